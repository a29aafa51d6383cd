"""Compute Figure 1 of Helix by the formula of its appendix A: the time to read the KV and the weights of a layer."""

from dataclasses import dataclass
from math import ceil

from longhelix.figures.charts import Chart, Curve, Panel
from longhelix.figures.claims import Table
from longhelix.spec import FORMATS, ModelSpec
from longhelix.spec.ffn import MLP

MEMORY_BYTES_PER_S = 8000e9
BATCH = 8
DTYPE = "fp4"
WIDTHS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (2**15, 2**17, 2**19, 10**6, 2 * 10**6, 4 * 10**6)
KVP_WIDTHS = (1, 2, 4, 8)
_TPA = 8


@dataclass(frozen=True)
class ReadTime:
    """Time to read the KV and the weights of one layer, in microseconds."""

    kv_us: float
    weights_us: float


def appendix_a(model: ModelSpec, *, tpa: int, tpf: int, kvp: int = 1, context: float = 1e6) -> ReadTime:
    """Compute read times by appendix A of arXiv 2507.07120, with the batch, dtype and bandwidth of its Figure 1.

    The formula assumes that Wo is sharded over the TPA ranks, although Helix shards Wo over all ranks. The planner uses
    the number of bytes that the ranks actually read.
    """
    per_us = FORMATS[DTYPE].bits / 8 / MEMORY_BYTES_PER_S * 1e6
    (attention,), (ffn,), hidden = model.attentions, model.ffns, model.hidden_size
    assert isinstance(ffn, MLP)
    kv_heads, head_size = ceil(attention.heads.num_kv_heads / tpa), attention.head_size
    projections = 2 * hidden * attention.heads.num_query_heads / tpa * head_size + 2 * hidden * kv_heads * head_size
    return ReadTime(
        kv_us=BATCH * 2 * kv_heads * head_size * context / kvp * per_us,
        weights_us=(projections + 3 * hidden * ffn.num_columns / tpf) * per_us,
    )


def figure_1(model: ModelSpec) -> tuple[Chart, Table]:
    """Return a chart and a table of read times by TP width, by context at TP 8, and by KVP at TPA 8, TPF = 8 KVP."""
    by_tp = [appendix_a(model, tpa=tp, tpf=tp) for tp in WIDTHS]
    by_context = [appendix_a(model, tpa=_TPA, tpf=_TPA, context=context) for context in CONTEXTS]
    by_kvp = [appendix_a(model, tpa=_TPA, tpf=_TPA * kvp, kvp=kvp) for kvp in KVP_WIDTHS]
    panels = (
        _panel("S = 1M", "TP", WIDTHS, by_tp),
        _panel("TP = 8", "KV length S", CONTEXTS, by_context),
        _panel("S = 1M, TPA = 8, TPF = 8 KVP", "KVP", KVP_WIDTHS, by_kvp),
    )
    rows = [
        *((f"TP {tp}, S 1M", read.kv_us, read.weights_us) for tp, read in zip(WIDTHS, by_tp, strict=True)),
        *((f"TP 8, S {s:,}", read.kv_us, read.weights_us) for s, read in zip(CONTEXTS, by_context, strict=True)),
        *((f"KVP {k}, TPA 8, S 1M", read.kv_us, read.weights_us) for k, read in zip(KVP_WIDTHS, by_kvp, strict=True)),
    ]  # fmt: skip
    table = Table(
        name="figure_1",
        title="Figure 1: microseconds to read one layer's KV and weights",
        columns=("setting", "KV (us)", "weights (us)"),
        rows=tuple(rows),
        note=(
            "The times come only from the formula of appendix A at 8000 GB/s, without efficiencies, kernels or "
            "communication. Beyond TP = K = 8, TP replicates the KV, and the time to read the KV stays the same. KVP "
            "reduces this time further."
        ),
    )
    return Chart(
        "helix-figure-1", "Helix, Figure 1: DRAM reads of one layer (B 8, Q 128, K 8, F 65536, FP4)", panels
    ), table


def _panel(title: str, x: str, values: tuple[int, ...], reads: list[ReadTime]) -> Panel:
    kv = Curve.of("KV cache", values, [read.kv_us for read in reads])
    weights = Curve.of("weights", values, [read.weights_us for read in reads])
    total = Curve.of("both", values, [read.kv_us + read.weights_us for read in reads], "k--")
    return Panel(title, x, "read time (us)", (kv, weights, total), log="xy", every_x=x != "KV length S")
