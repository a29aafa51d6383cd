"""Table of the sp benchmark: prefill time and sent bytes of two ranks, with and without sequence parallelism."""

from collections.abc import Callable

from longhelix.measure import sequence_parallelism
from longhelix.measure.bench.section import Column, Section
from longhelix.measure.link import BURST_S
from longhelix.measure.sequence_parallelism import SequenceParallelismJob
from longhelix.measure.world import Row

COLUMNS = (
    Column("link", "link"),
    Column("prompt", "prompt, tokens", ",d"),
    Column("execution", "execution"),
    Column("activation_dtype", "activations"),
    Column("variant", "variant"),
    Column("sharded_tokens", "sharded tokens", ",d"),
    Column("prefill_s", "prefill, s", ".3f"),
    Column("spread", "spread, %", ".0f", 100),
    Column("time_over_off", "time vs off", ".2f"),
    Column("sent_bytes", "sent, MB", ",.2f", 1e-6),
    Column("bytes_over_off", "bytes vs off", ".2f"),
    Column("formula_bytes", "formula, MB", ",.2f", 1e-6),
    Column("over_formula", "sent vs formula", ".3f"),
)
NOTE = (
    "prefill: time until both ranks have the first token of a prompt of random tokens. There are two ranks with "
    "{threads} each, kvp x tpa is {layout}, and chunks have {chunk_tokens:,} tokens. All configurations run in turn, "
    "in reverse order every other round. All collectives use gloo instead of shared memory. After a pause, a link "
    "sends a burst of up to {burst_ms:g} ms at its rate, but at least 4 KB. The row above each variant is its "
    "baseline, off, which has the same execution and number formats. sharded tokens: tokens in sequence-parallel "
    "steps. sent: bytes that both ranks send in one prefill. The network devices count these bytes, with one header "
    "for each piece that TCP sends. formula: computed bytes of ring all-reduces, reduce-scatters and all-gathers of "
    "the rows, and of Helix's exchange. It is empty for models with MLA or experts. The formula excludes headers and "
    "token sampling, so prompts of 1 to 5 tokens send 1.2 to 2.4 times as much."
)


def section(job: SequenceParallelismJob, on_point: Callable[[Row], None]) -> Section:
    """Run the job in two new rank processes. Returns the table."""
    rows = sequence_parallelism.measure(job, on_point)
    threads = rows[0]["threads"]
    values = rows[0] | {"burst_ms": 1e3 * BURST_S, "threads": "one thread" if threads == 1 else f"{threads} threads"}
    return Section(name="sp", title="Sequence parallelism", note=NOTE.format_map(values), columns=COLUMNS, rows=rows)
