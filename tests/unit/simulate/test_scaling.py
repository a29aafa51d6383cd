"""Stages shorten a long prefill nearly by their number, and no decode (Mnemosyne, arXiv 2409.17264, section 4.3)."""

import pytest

from longhelix.layout import Layout
from longhelix.perf.setting import Setting
from longhelix.presets import load_model, load_system
from longhelix.scheduler.config import SchedulerConfig
from longhelix.simulate.arrival import Arrival
from longhelix.simulate.simulation import Server, simulate

pytestmark = pytest.mark.unit

SETTING = Setting(load_model("llama-3-70b"), load_system("h100"), "bfloat16", "bfloat16")


def served(pp, *arrivals):
    """By stages of TP 8 on H100s."""
    settings = SchedulerConfig(kvp=1, pp=pp, num_blocks=10**6, max_model_len=2 * 10**6, chunk_tokens=4096)
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
