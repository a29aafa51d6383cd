"""The table of collectives: shared memory and gloo, side by side."""

from collections.abc import Callable, Sequence

from longhelix.measure import collectives
from longhelix.measure.bench.section import Column, Plot, Section
from longhelix.measure.collectives import BURST_CALLS, SETTLING_CALLS
from longhelix.measure.world import Row

COLUMNS = (
    Column("collective", "collective"),
    Column("ranks", "ranks", "d"),
    Column("bytes", "bytes", ",d"),
    Column("shm_s", "shm, us", ",.1f", 1e6),
    Column("spread", "spread, %", ".0f", 100),
    Column("gloo_s", "gloo, us", ",.1f", 1e6),
    Column("speedup", "times faster", ".1f"),
)
NOTE = (
    "Of bfloat16 numbers, one thread a rank, by the process group's own methods, as the model calls them. bytes: the "
    "whole tensor, which is what a rank reduces, sends in all, or gathers. Each call begins after a barrier, which is "
    f"not counted. shm and gloo in turns of {BURST_CALLS} calls, whose first {SETTLING_CALLS} are not counted; medians "
    "on rank 0."
)


def section(
    ranks: Sequence[int], sizes_bytes: tuple[int, ...], repeats: int, on_point: Callable[[Row], None]
) -> Section:
    """Measure with each number of ranks, one after the other."""
    rows = collectives.measure(ranks, sizes_bytes, repeats, on_point)
    plot = Plot(("shm_s", "gloo_s"), ("collective", "ranks"), x="bytes")
    return Section("collectives", "Collectives", NOTE, COLUMNS, rows, plot)
