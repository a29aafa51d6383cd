"""Table of sequence parallelism: prefill time and bytes between two ranks, with and without sequence parallelism."""

from collections.abc import Callable

from longhelix.measure import sequence_parallelism
from longhelix.measure.bench.section import Column, Section
from longhelix.measure.link import BURST_S
from longhelix.measure.sequence_parallelism import SequenceParallelismJob
from longhelix.measure.world import Row

COLUMNS = (
    Column("link", "link"),
    Column("prompt", "prompt", ",d"),
    Column("execution", "layers"),
    Column("activation_dtype", "activations"),
    Column("variant", "variant"),
    Column("sharded_tokens", "on shards", ",d"),
    Column("prefill_s", "prefill, s", ".3f"),
    Column("spread", "spread, %", ".0f", 100),
    Column("time_over_off", "over off", ".2f"),
    Column("sent_bytes", "sent, MB", ",.2f", 1e-6),
    Column("bytes_over_off", "over off", ".2f"),
    Column("formula_bytes", "formula, MB", ",.2f", 1e-6),
    Column("over_formula", "sent over formula", ".3f"),
)
NOTE = (
    "A prompt of random tokens on two ranks of {threads} each, kvp x tpa {layout}, in chunks of {chunk_tokens:,}, "
    "until both ranks have the first token. All configurations run in turn, in reverse order every other time. Gloo "
    "carries all collectives, never shared memory. After a pause, a link passes a burst of up to {burst_ms:g} ms at "
    "its rate, but at least 4 KB. Each variant follows its baseline, off, which has the same layers and number "
    "formats. on shards: tokens in sequence-parallel steps. sent: bytes of both ranks in one prefill, as the devices "
    "of the link count them, with one header for each piece that TCP hands over. formula: ring all-reduces, "
    "reduce-scatters and all-gathers of the rows, and Helix's exchange; empty for models with latents or experts. "
    "The formula leaves out headers and token sampling, so prompts of 1 to 5 tokens send 1.2 to 2.4 times as much."
)


def section(job: SequenceParallelismJob, on_point: Callable[[Row], None]) -> Section:
    """Run the job on two new ranks, and create the table."""
    rows = sequence_parallelism.measure(job, on_point)
    threads = rows[0]["threads"]
    values = rows[0] | {"burst_ms": 1e3 * BURST_S, "threads": "one thread" if threads == 1 else f"{threads} threads"}
    return Section(name="sp", title="Sequence parallelism", note=NOTE.format_map(values), columns=COLUMNS, rows=rows)
