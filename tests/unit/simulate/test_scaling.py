"""Stages shorten a long prefill nearly by their number, and no decode (Mnemosyne, arXiv 2409.17264, section 4.3); KVP
that grows with a request keeps its iterations as they are (section 4.4)."""

from pathlib import Path

import pytest

from longhelix import figures
from longhelix.perf.setting import Dtypes, Setting
from longhelix.simulate.arrival import Arrival
from longhelix.simulate.simulation import Observer, Server, simulate
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model, load_system
from scheduler_settings import scheduler_config

pytestmark = pytest.mark.unit

# The paper's own, whose attention takes as long as the paper says.
H100 = load_system(str(Path(figures.__file__).parent / "systems" / "h100.toml"))
SETTING = Setting(load_model("llama-3-70b"), H100, Dtypes("bfloat16", "bfloat16"))


def served(pp, *arrivals):
    """By stages of TP 8 on H100s."""
    settings = scheduler_config(kvp=1, pp=pp, num_blocks=10**6, max_model_len=2 * 10**6, chunk_tokens=4096)
    return simulate(Server(SETTING, Layout(tpa=8, pp=pp), settings, hop_b=False), list(arrivals))


def test_sixteen_stages_keep_four_fifths_of_their_number():
    ttft_s = {pp: served(pp, Arrival(0.0, 10**6, 1)).ttft.most_s for pp in (1, 2, 4, 8, 16)}
    scaling = {pp: ttft_s[1] / seconds / pp for pp, seconds in ttft_s.items()}
    assert all(0.8 <= share <= 1 for share in scaling.values()), scaling
    assert scaling[2] > scaling[16]  # the first chunk fills the pipeline


def test_a_lone_decode_is_no_faster_for_stages():
    one, four = (served(pp, Arrival(0.0, 10_000, 50)).tbt for pp in (1, 4))
    assert four.sum_s / four.count >= one.sum_s / one.count


def test_many_decodes_keep_all_stages_busy():
    """Each of four stages reads its quarter of the weights for each of four microbatches, where one stage reads all of
    them once."""
    one, four = (served(pp, *(Arrival(0.0, 1000, 400) for _ in range(32))).tokens_per_s for pp in (1, 4))
    assert 0.75 * one < four < 1.5 * one


M = 10**6
SMALL = Setting(load_model("llama-3-8b"), H100, Dtypes("bfloat16", "bfloat16"))


class Prefill(Observer):
    """How long the chunks' steps took, by the prompt tokens that were done after them."""

    def __init__(self):
        self.steps_s = {}
        self._done = 0

    def ran(self, step):
        if step.step.chunks:
            self._done += step.step.work.chunk_rows
            self.steps_s[self._done] = step.result.measured.taken_s


def grown(placement, tokens, new_tokens=1):
    """A prompt on four groups of four stages of TP 8; a group has half a million tokens before the next one joins."""
    settings = scheduler_config(
        kvp=4, pp=4, num_blocks=2 * 10**5, max_model_len=3 * M, chunk_tokens=500, placement=placement,
        growth_limit_tokens=M // 2,
    )  # fmt: skip
    layout, seen = Layout(kvp=4, tpa=8, tpf=8, ffn_replicas=4, pp=4), Prefill()
    outcome = simulate(Server(SMALL, layout, settings, hop_b=False), [Arrival(0.0, tokens, new_tokens)], seen)
    return outcome, seen.steps_s


def test_iterations_stay_as_they_are_from_the_second_group_to_the_fourth():
    """While its first group fills, they grow as one group's do; what is spread evenly grows to the end."""
    growing, striped = (grown(placement, 2 * M)[1] for placement in ("growing", "striped"))
    full_s = growing[M // 2]
    assert all(seconds == pytest.approx(full_s, rel=0.01) for done, seconds in growing.items() if done >= M // 2)
    assert growing[M // 4] < 0.6 * full_s
    assert striped[M // 2] < 0.4 * full_s
    assert striped[2 * M] == pytest.approx(full_s, rel=0.01)


def test_a_decode_is_bounded_by_the_limit_and_not_by_an_even_share():
    def tbt_s(placement, tokens):
        tbt = grown(placement, tokens, 50)[0].tbt
        return tbt.sum_s / tbt.count

    half, whole = tbt_s("growing", M // 2), tbt_s("growing", 2 * M - 100)
    assert half == pytest.approx(whole, rel=0.01)
    assert tbt_s("striped", M // 2) < 0.85 * half
    assert tbt_s("striped", 2 * M - 100) == pytest.approx(whole, rel=0.01)
