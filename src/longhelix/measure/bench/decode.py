"""Table of decode: the time of one step of one long request."""

from collections.abc import Callable, Sequence

from longhelix.measure import decode
from longhelix.measure.bench.section import Column, Plot, Section
from longhelix.measure.world import Row

COLUMNS = (
    Column("context", "context", ",d"),
    Column("weight_dtype", "weights"),
    Column("activation_dtype", "--activation-dtype"),
    Column("kv_dtype", "KV"),
    Column("attention_dtype", "--attention-dtype"),
    Column("layout", "kvp x tpa"),
    Column("threads", "threads", "d"),
    Column("execution", "layers"),
    Column("step_s", "step, ms", ".2f", 1e3),
    Column("spread", "spread, %", ".0f", 100),
    Column("read_bytes", "read, MB", ",.0f", 1e-6),
    Column("bytes_per_s", "GB/s", ".1f", 1e-9),
    Column("memory_bytes_per_s", "memory, GB/s", ".1f", 1e-9),
    Column("fraction", "fraction", ".2f"),
    Column("native_s", "native, ms", ".2f", 1e3),
    Column("outside_s", "overhead, ms", ".2f", 1e3),
    Column("peak_rss_bytes", "peak RSS, MB", ",.0f", 1e-6),
    Column("formula_bytes", "formula, MB", ",.0f", 1e-6),
)
NOTE = (
    "One step of one request with random KV: the model on all ranks and sampling, without scheduler and sockets. "
    "read: weights and KV of all ranks, by formula. memory: rate of the read kernel, in turn with the steps. "
    "fraction: GB/s divided by memory. native: time inside native calls, including collectives. overhead: the rest "
    "of the step. native and overhead are means of separately timed steps. peak RSS: peak during decode minus the "
    "memory before loading, on the rank that uses most; it includes newly read pages of libraries. formula: weights "
    "and KV of that rank."
)


def section(jobs: Sequence[decode.DecodeJob], on_point: Callable[[Row], None]) -> Section:
    """Run each job on new ranks, and create the table."""
    plot = Plot(("step_s",), ("layout", "weight_dtype", "activation_dtype", "kv_dtype"), x="context")
    return Section(
        name="decode", title="Decode", note=NOTE, columns=COLUMNS, rows=decode.measure(jobs, on_point), plot=plot
    )
