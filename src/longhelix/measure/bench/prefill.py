"""Table of the prefill benchmark: the time to compute a whole prompt in chunks."""

from collections.abc import Callable, Sequence

from longhelix.measure import prefill
from longhelix.measure.bench.section import Column, Plot, Section
from longhelix.measure.hosts import MeasuringHosts
from longhelix.measure.world import Row

COLUMNS = (
    Column("prompt", "prompt, tokens", ",d"),
    Column("chunk_tokens", "chunk, tokens", "d"),
    Column("weight_dtype", "weights"),
    Column("activation_dtype", "--activation-dtype"),
    Column("kv_dtype", "KV"),
    Column("attention_dtype", "--attention-dtype"),
    Column("layout", "kvp x tpa"),
    Column("threads", "threads", "d"),
    Column("execution", "execution"),
    Column("prefill_s", "prefill, s", ".3f"),
    Column("spread", "spread, %", ".0f", 100),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("flops_per_s", "GFLOP/s", ",.0f", 1e-9),
    Column("matmul_flops_per_s", "torch.mm, GFLOP/s", ",.0f", 1e-9),
    Column("mfu", "MFU", ".2f"),
    Column("attention_s", "attention, s", ".2f"),
    Column("products_s", "products, s", ".2f"),
    Column("collectives_s", "collectives, s", ".2f"),
    Column("outside_s", "overhead, s", ".2f"),
)
NOTE = (
    "prefill: time to compute a prompt of random tokens in chunks and to sample the first token. GFLOP/s counts only "
    "the operations that causal attention needs. torch.mm: rate of square matrix products on all ranks, in the model's "
    "dtype or in float32 if that is faster, measured in turn with the prefills. MFU: GFLOP/s divided by the rate of "
    "torch.mm. attention, products, collectives: time inside native calls of each kind. overhead: time outside native "
    "calls. The last four columns are means over all prefills."
)


def section(
    jobs: Sequence[prefill.PrefillJob], on_point: Callable[[Row], None], hosts: MeasuringHosts | None = None
) -> Section:
    """Run each job in new rank processes. Returns the table."""
    plot = Plot(("tokens_per_s",), ("layout", "weight_dtype", "activation_dtype", "kv_dtype"), x="prompt")
    return Section(
        name="prefill",
        title="Prefill",
        note=NOTE,
        columns=COLUMNS,
        rows=prefill.measure(jobs, on_point, hosts),
        plot=plot,
    )
