"""The table of decode: one step of one long request."""

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
    "One step of one request whose KV holds random numbers: the model on all ranks and sampling, without scheduler and "
    "sockets. read: weights and KV by formula, of all ranks. memory: the read kernel in turn with the steps. fraction: "
    "GB/s over memory. native: inside native calls, collectives included; overhead: outside of them; means of other "
    "steps, timed apart. peak RSS: while it decodes, beyond what the process had before loading, of the fullest rank, "
    "with what it reads anew of its libraries; formula: its weights and KV."
)


def section(jobs: Sequence[decode.DecodeJob], on_point: Callable[[Row], None]) -> Section:
    """Run each job on ranks of its own."""
    plot = Plot(("step_s",), ("layout", "weight_dtype", "activation_dtype", "kv_dtype"), x="context")
    return Section("decode", "Decode", NOTE, COLUMNS, decode.measure(jobs, on_point), plot)
