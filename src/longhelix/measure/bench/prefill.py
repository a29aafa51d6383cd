"""Table of prefill: the time to compute a whole prompt in chunks."""

from collections.abc import Callable, Sequence

from longhelix.measure import prefill
from longhelix.measure.bench.section import Column, Plot, Section
from longhelix.measure.world import Row

COLUMNS = (
    Column("prompt", "prompt", ",d"),
    Column("chunk_tokens", "chunk", "d"),
    Column("weight_dtype", "weights"),
    Column("activation_dtype", "--activation-dtype"),
    Column("kv_dtype", "KV"),
    Column("attention_dtype", "--attention-dtype"),
    Column("layout", "kvp x tpa"),
    Column("threads", "threads", "d"),
    Column("execution", "layers"),
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
    "A prompt of random tokens in chunks, up to the first sampled token. GFLOP/s counts the operations that causal "
    "attention needs. MFU: GFLOP/s divided by that of torch.mm in the model's dtype (square matrices, in float32 if "
    "that is faster), measured in turn with the prefills, over all ranks. attention, products, collectives: time "
    "inside native calls of each kind. overhead: time outside native calls. These four are means over all prefills."
)


def section(jobs: Sequence[prefill.PrefillJob], on_point: Callable[[Row], None]) -> Section:
    """Run each job on new ranks, and create the table."""
    plot = Plot(("tokens_per_s",), ("layout", "weight_dtype", "activation_dtype", "kv_dtype"), x="prompt")
    return Section(
        name="prefill", title="Prefill", note=NOTE, columns=COLUMNS, rows=prefill.measure(jobs, on_point), plot=plot
    )
