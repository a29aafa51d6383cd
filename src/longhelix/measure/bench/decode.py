"""Table of the decode benchmark: the time of one decode step of one long request."""

from collections.abc import Callable, Sequence

from longhelix.measure import decode
from longhelix.measure.bench.section import Column, Plot, Section
from longhelix.measure.hosts import MeasuringHosts
from longhelix.measure.world import Row

COLUMNS = (
    Column("context", "context, tokens", ",d"),
    Column("weight_dtype", "weights"),
    Column("activation_dtype", "--activation-dtype"),
    Column("kv_dtype", "KV"),
    Column("attention_dtype", "--attention-dtype"),
    Column("layout", "kvp x tpa"),
    Column("threads", "threads", "d"),
    Column("execution", "execution"),
    Column("step_s", "step, ms", ".2f", 1e3),
    Column("spread", "spread, %", ".0f", 100),
    Column("read_bytes", "read, MB", ",.0f", 1e-6),
    Column("bytes_per_s", "GB/s", ".1f", 1e-9),
    Column("memory_bytes_per_s", "memory, GB/s", ".1f", 1e-9),
    Column("fraction", "fraction of memory rate", ".2f"),
    Column("native_s", "native, ms", ".2f", 1e3),
    Column("outside_s", "overhead, ms", ".2f", 1e3),
    Column("peak_rss_bytes", "peak RSS, MB", ",.0f", 1e-6),
    Column("formula_bytes", "formula, MB", ",.0f", 1e-6),
)
NOTE = (
    "step: time of one decode step of one request with random KV. It includes the model on all ranks and sampling, but "
    "not the scheduler and sockets. read: computed bytes of the weights and KV of all ranks. memory: rate of the read "
    "kernel, which runs in turn with the steps. fraction of memory rate: GB/s divided by memory. native: time inside "
    "native calls, including collectives. overhead: the rest of the step. native and overhead are means of separately "
    "timed steps. peak RSS: peak memory use during decode minus the memory use before loading, on the rank that uses "
    "the most memory. It includes library pages that the process reads for the first time. formula: computed bytes of "
    "the weights and KV of this rank."
)


def section(
    jobs: Sequence[decode.DecodeJob], on_point: Callable[[Row], None], hosts: MeasuringHosts | None = None
) -> Section:
    """Run each job in new rank processes. Returns the table."""
    plot = Plot(("step_s",), ("layout", "weight_dtype", "activation_dtype", "kv_dtype"), x="context")
    return Section(
        name="decode", title="Decode", note=NOTE, columns=COLUMNS, rows=decode.measure(jobs, on_point, hosts), plot=plot
    )
