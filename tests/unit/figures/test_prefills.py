"""Costs that only the figures need: adaptive chunks, ring attention, weights prefetched during all-reduces."""

import numpy as np
import pytest

from longhelix import Layout
from longhelix.figures.prefetch import prefetched, prefetched_seconds
from longhelix.figures.prefills import adaptive_prefill, ring_seconds
from longhelix.perf.cost_item import total_seconds
from longhelix.perf.layouts import Layouts
from longhelix.perf.prefill import prefill_seconds
from longhelix.perf.setting import Dtypes, Setting
from longhelix.perf.step import decode_items, decode_seconds
from longhelix.spec.presets import load_model, load_system

pytestmark = pytest.mark.unit

GB200 = load_system("gb200")
SMALL = Setting(load_model("llama-3-8b"), load_system("h100"), Dtypes("bfloat16", "bfloat16"))
LARGE = Setting(load_model("llama-3.1-405b"), GB200, Dtypes("fp4", "fp4", "fp4"))


def one(**degrees):
    return Layouts.of([Layout(**degrees)])


def test_striped_rings_attend_in_half_of_the_time():
    how = SMALL
    layouts = one(kvp=16, tpa=8, tpf=8, ffn_replicas=16)
    ring_s, striped_s = (ring_seconds(how, layouts, 1e6, striped=striped)[0] for striped in (False, True))
    assert 1.5 < ring_s / striped_s <= 2


def test_adaptive_chunks_shrink_and_keep_the_target():
    how, layouts = SMALL, one(tpa=8)
    adaptive = adaptive_prefill(how, layouts, 1e6, 0.1)
    assert (np.diff(adaptive.chunks[:, 0]) <= 0).all()
    assert adaptive.chunks[0, 0] > adaptive.chunks[-1, 0]
    assert (adaptive.steps_s <= 0.1).all()
    static = [prefill_seconds(how, layouts, 1e6, float(chunk))[0] for chunk in np.unique(adaptive.chunks)]
    assert static[-1] < adaptive.seconds[0] < static[0]


def test_weights_are_read_behind_all_reduces():
    layouts = one(kvp=8, tpa=8)
    items = decode_items(LARGE, layouts, 1.0, 1e6)
    before, after = ({item.name: item for item in each} for each in (items, prefetched(LARGE, layouts, items)))
    for name, wait in (("QKV", "all-reduce after FFN"), ("dense FFN", "all-reduce after attention")):
        hidden_s = before[name].seconds[0] - after[name].seconds[0]
        read_s = before[name].hbm_bytes[0] / (GB200.memory.bytes_per_s * GB200.memory.efficiency)
        assert hidden_s == pytest.approx(min(before[wait].seconds[0], read_s))
        assert before[name].hbm_bytes[0] == after[name].hbm_bytes[0]
    small = total_seconds(prefetched(LARGE, layouts, items, cache_bytes=1e3))[0]
    assert small == pytest.approx(total_seconds(items)[0], rel=1e-4)
    tied = one(kvp=8, tpa=8, tpf=8, ffn_replicas=8)
    assert prefetched_seconds(LARGE, tied, 1.0, 1e6)[0] == decode_seconds(LARGE, tied, 1.0, 1e6)[0]
