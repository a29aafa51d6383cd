"""The table of sequence parallelism: what it saves of a prefill, in seconds and in bytes between two ranks."""

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
    "until both ranks have the first token; all configurations in turn, every other time in reverse order. Gloo "
    "carries all collectives, never shared memory. After a pause, a link lets pass at once what it carries in "
    "{burst_ms:g} ms, or 4 KB. Below its baseline, off, stands each variant: the same layers and number formats. on "
    "shards: tokens of steps that are sequence-parallel. sent: by both ranks in one prefill, as the devices of the "
    "link count, with one header for all that TCP hands over at once. formula: all-reduces by a ring, reduce-scatters "
    "and all-gathers of the rows, and Helix's exchange; none for models with latents or experts. It leaves out "
    "headers and the choice of a token: of prompts of 1 to 5 tokens, 1.2 to 2.4 times as much is sent."
)


def section(job: SequenceParallelismJob, on_point: Callable[[Row], None]) -> Section:
    """Run the job on ranks of its own."""
    rows = sequence_parallelism.measure(job, on_point)
    threads = rows[0]["threads"]
    said = rows[0] | {"burst_ms": 1e3 * BURST_S, "threads": "one thread" if threads == 1 else f"{threads} threads"}
    return Section("sp", "Sequence parallelism", NOTE.format_map(said), COLUMNS, rows)
