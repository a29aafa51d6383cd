"""A simulated step in which one request decodes takes what the planner says of it."""

import pytest

from longhelix.perf.layouts import Layouts
from longhelix.perf.setting import Dtypes, Setting
from longhelix.perf.step import decode_seconds
from longhelix.scheduler.request import MOST_TOKENS
from longhelix.simulate.arrival import Arrival
from longhelix.simulate.simulation import Observer, Server, simulate
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model, load_system
from scheduler_settings import scheduler_config

pytestmark = pytest.mark.unit

CONTEXTS = (500, 2_046, 20_000, 1_000_000)  # deepseek-v3.2 chooses 2,048 tokens
LAYOUTS = {
    "deepseek-v3.2": Layout(kvp=8, tpf=1, ep=8),
    "qwen3-next-80b-a3b": Layout(kvp=4, tpa=2, tpf=1, ep=8),
    "deepseek-r1": Layout(kvp=4, tpf=2, ep=2),
    "llama-3.1-405b": Layout(kvp=8, tpa=8),
}
OUTPUT_TOKENS = 5


class Decodes(Observer):
    """Keeps the tokens that are attended to and the seconds of every step that decodes."""

    def __init__(self):
        self.seconds = {}

    def ran(self, step):
        work = step.step.work
        if work.decode_rows:
            assert (work.decode_rows, work.chunk_rows) == (1, 0)
            self.seconds[step.step.id] = step.result.measured.taken_s


def simulated_seconds(setting, layout, placement, context):
    scheduler = scheduler_config(
        kvp=layout.kvp,
        num_blocks=100_000,
        max_model_len=MOST_TOKENS,
        chunk_tokens=2 * context,
        placement=placement,
        prefix_cache=False,
    )
    seen = Decodes()
    simulate(Server(setting, layout, scheduler), [Arrival(0.0, context, OUTPUT_TOKENS)], seen)
    return list(seen.seconds.values())


@pytest.mark.parametrize("placement", ["striped", "local"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_one_request_decodes_as_fast_as_planned(name, placement):
    setting, layout = Setting(load_model(name), load_system("gb200"), Dtypes("fp8", "fp8")), LAYOUTS[name]
    planned = Layouts.of([layout], local=placement == "local")
    for context in CONTEXTS:
        # The first token is the prompt's; each later one attends to itself as well.
        expected = [decode_seconds(setting, planned, 1.0, context + n)[0] for n in range(1, OUTPUT_TOKENS)]
        assert simulated_seconds(setting, layout, placement, context) == pytest.approx(expected, rel=1e-12)
