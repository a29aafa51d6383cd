"""The presets of NVIDIA's GPUs order as the hardware does: reads follow the memory, all other costs are the same."""

import pytest

from longhelix.perf.layouts import Layouts
from longhelix.perf.setting import Dtypes, Setting
from longhelix.perf.step import decode_items
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model, load_system

pytestmark = pytest.mark.unit

GENERATIONS = ("h100", "h200", "b200", "gb300")
# Weights and KV are what small batches wait for; what links move in such a step takes far less.
READS = 0.01


def step(system: str, model: str, layout: Layout, batch: float, context: float) -> tuple[float, float]:
    """Seconds of a decode step, and how many of them its kernels read and compute for."""
    setting = Setting(load_model(model), load_system(system), Dtypes("bfloat16", "bfloat16"))
    items = decode_items(setting, Layouts.of([layout]), batch, context)
    kernels = [item for item in items if item.hbm_bytes[0] > 0]
    working_s = sum(float(item.seconds[0] - item.fixed_s[0]) for item in kernels)
    return sum(float(item.seconds[0]) for item in items), working_s


@pytest.mark.parametrize(
    ("model", "layout", "batch", "context"),
    [
        ("llama-3-8b", Layout(tpa=8), 1.0, 1e4),
        ("llama-3-8b", Layout(tpa=8), 8.0, 1e5),
        ("llama-3-8b", Layout(kvp=2, tpa=4), 8.0, 1e5),
        ("llama-3-70b", Layout(tpa=8), 1.0, 1e6),
        ("llama-3-70b", Layout(kvp=4, tpa=2, tpf=8), 1.0, 1e6),
    ],
)
def test_a_step_is_faster_by_what_memory_is_and_by_no_more(model, layout, batch, context):
    steps = [step(system, model, layout, batch, context) for system in GENERATIONS]
    rates = [load_system(system).memory.bytes_per_s for system in GENERATIONS]
    for slow in range(len(GENERATIONS) - 1):
        (slow_s, slow_reads_s), (fast_s, fast_reads_s) = steps[slow], steps[slow + 1]
        gain = rates[slow + 1] / rates[slow]
        assert 1 < slow_s / fast_s < gain * (1 + READS)
        assert slow_reads_s / fast_reads_s == pytest.approx(gain, rel=READS)


def test_what_a_step_costs_beside_its_reads_is_the_same_in_every_generation():
    costs = [step(system, "llama-3-8b", Layout(tpa=8), 1.0, 1e4) for system in GENERATIONS]
    beside = [all_s - reads_s for all_s, reads_s in costs]
    assert max(beside) < min(beside) * (1 + READS)
