"""Table of the collectives benchmark: the times of collectives over shared memory and over gloo."""

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
    Column("speedup", "speedup of shm", ".1f"),
)
NOTE = (
    "Collectives of bfloat16 numbers over shared memory (shm) and gloo, with one thread per rank. They are called "
    "through the process group, as in the model. bytes: size of the whole tensor. Each call starts after a barrier, "
    f"which is not measured. shm and gloo run in turn, in bursts of {BURST_CALLS} calls. The first {SETTLING_CALLS} "
    "calls of each burst are not measured. Times are medians on rank 0."
)


def section(
    ranks: Sequence[int], sizes_bytes: tuple[int, ...], repeats: int, on_point: Callable[[Row], None]
) -> Section:
    """Measure the collectives with each number of ranks. Returns the table."""
    rows = collectives.measure(ranks, sizes_bytes, repeats, on_point)
    plot = Plot(("shm_s", "gloo_s"), ("collective", "ranks"), x="bytes")
    return Section(name="collectives", title="Collectives", note=NOTE, columns=COLUMNS, rows=rows, plot=plot)
