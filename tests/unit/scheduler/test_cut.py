"""The parts that a step attends in: chosen by its cost, or as many as were asked for and the batch has."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhelix.engine.workers.step_cost import step_cost
from longhelix.measure.configuration import configure
from longhelix.perf.layouts import Layouts
from longhelix.perf.setting import Dtypes, Setting
from longhelix.perf.step import step_seconds
from longhelix.perf.step_cost import StepCost
from longhelix.scheduler.cut import Cut
from longhelix.scheduler.work import PART_ROWS, Work
from longhelix.spec.hosts import Hosts
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model, load_system

pytestmark = pytest.mark.unit

BUILTIN = configure("builtin", Layout(kvp=2), [8192], weight_dtype=None, kv_dtype=None)
SLOW_LINK = load_system("cpu").replaced({"scale_out.bytes_per_s": 5e6, "scale_out.latency_s": 1e-4}, "test")
SLOW_LATENCY = load_system("cpu").replaced({"scale_out.latency_s": 1.0}, "test")
LONG_DECODES = Work.decode(8, 100_000)


def parts(work, system=SLOW_LINK, device="cpu", hop_b=None):
    config = replace(BUILTIN, machines=replace(BUILTIN.machines, system=system, device=device))
    return Cut(step_cost(config, overlaps=True), hop_b).parts(work)


def test_more_parts_where_a_slow_link_and_long_contexts_take_similar_time():
    assert 1 < parts(LONG_DECODES) <= 8


@pytest.mark.parametrize(
    ("work", "system"),
    [(Work.decode(1, 100_000), SLOW_LINK), (Work.decode(8, 16), SLOW_LINK), (LONG_DECODES, SLOW_LATENCY)],
    ids=["one request", "short attention", "fixed cost beyond attention"],
)
def test_one_exchange_where_a_second_does_not_pay(work, system):
    assert parts(work, system) == 1


@pytest.mark.parametrize(
    ("decodes", "chunk_rows", "expected"),
    [(8, 0, 4), (3, 0, 3), (0, 200, 3), (0, 100, 1), (1, 100, 1), (8, 512, 4), (60, 70, 2), (0, 0, 1)],
)
def test_what_was_asked_for_is_a_limit(decodes, chunk_rows, expected):
    """A decode may be a part, and rows of chunks are cut with decodes beside them as well, by PART_ROWS at least."""
    assert PART_ROWS == 64
    work = Work.decode(decodes, 16) + Work.chunk(chunk_rows, 0)
    assert parts(work, hop_b=4) == expected
    assert parts(work, hop_b=4, device="cuda") == expected
    assert parts(work, hop_b=1) == 1


def test_the_choice_is_the_cost_models():
    """The same seconds by the arrays of the planner: no other number of parts takes fewer."""
    chosen = parts(LONG_DECODES)
    system = SLOW_LINK.replaced({"part_fixed_share": 1.0, "scale_up.ranks": 1}, "test")
    setting = Setting(BUILTIN.spec, system, Dtypes("bfloat16", "bfloat16"))
    layouts = Layouts.of([Layout(kvp=2)], hop_b=False)
    seconds = {count: step_seconds(setting, layouts, LONG_DECODES._replace(parts=count))[0] for count in (1, 2, 4, 8)}
    assert min(seconds, key=seconds.get) == chosen
    planned = step_seconds(setting, Layouts.of([Layout(kvp=2)], hop_b=True), LONG_DECODES)[0]
    assert seconds[chosen] == planned


@pytest.mark.parametrize(("mapping", "machines", "inside"), [("0;1", 2, 1), ("0-1;2-3", 2, 2), ("0-2;3", 4 / 3, 1)])
def test_ranks_of_several_hosts_have_the_machines_of_all_and_wait_for_the_fullest(mapping, machines, inside):
    hosts = Hosts.parse(mapping)
    of_hosts = replace(BUILTIN.machines, hosts=hosts, system=SLOW_LINK)
    config = replace(BUILTIN, layout=Layout(kvp=hosts.world_size), machines=of_hosts)
    system = SLOW_LINK.of_machines(machines).replaced({"scale_up.ranks": inside, "part_fixed_share": 1.0}, "test")
    expected = StepCost(Setting(config.spec, system, Dtypes("bfloat16", "bfloat16", packed=True)), config.layout)
    assert step_cost(config, overlaps=True).seconds(LONG_DECODES) == expected.seconds(LONG_DECODES)


def test_a_chunk_that_would_make_its_keys_again_in_every_part_stays_whole():
    """Latents of a long context, turned into keys and values by each part of a chunk."""
    system = load_system("cpu").replaced({"scale_up.ranks": 1, "part_fixed_share": 1.0}, "test")
    cost = StepCost(Setting(load_model("deepseek-r1"), system, Dtypes("bfloat16", "bfloat16")), Layout(kvp=4))
    chunk = Work.chunk(512, 20_000)
    assert Cut(cost).parts(chunk) == 1
    assert cost.seconds(chunk._replace(parts=8)) > 1.2 * cost.seconds(chunk)


def seconds(most):
    return st.floats(0, most, allow_subnormal=False)  # below, parts of a second are rounded away


@given(st.integers(1, 200), seconds(50), seconds(50), seconds(1), seconds(1))
def test_the_search_ends_where_no_power_of_two_is_faster(
    rows, attention_s, exchange_s, attention_again, exchange_again
):
    class Pipeline:
        def by_parts(self, work):
            return self.seconds

        def seconds(self, parts):
            attends = attention_s / parts + attention_again
            sends = exchange_s / parts + exchange_again
            return attends + (parts - 1) * max(attends, sends) + sends

    cost, work = Pipeline(), Work.decode(rows, 1)
    candidates = sorted({min(2**halving, rows) for halving in range(9)})
    found = Cut(cost).parts(work)
    assert found in candidates
    assert cost.seconds(found) <= min(map(cost.seconds, candidates)) * (1 + 1e-12)
