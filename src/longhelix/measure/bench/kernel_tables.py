"""Tables of the kernels benchmark: their titles, notes and columns."""

from dataclasses import dataclass

from longhelix.measure.bench.section import Column, Plot, Section
from longhelix.measure.world import Row

_THREADS = Column("threads", "threads", "d")
_CONTEXT = Column("context", "context, tokens", ",d")
_HEADS = (Column("num_query_heads", "query heads", "d"), Column("num_kv_heads", "KV heads", "d"))
_WEIGHT = (Column("weight_dtype", "weights"), Column("outputs", "outputs", "d"), Column("depth", "inputs", "d"))
_TIME = (Column("time_s", "time, ms", ".3f", 1e3), Column("spread", "spread, %", ".0f", 100))
_RATE = (
    Column("bytes_per_s", "GB/s", ".1f", 1e-9),
    Column("memory_bytes_per_s", "memory, GB/s", ".1f", 1e-9),
    Column("fraction", "fraction of memory rate", ".2f"),
)
_ARITHMETIC = (
    Column("flops_per_s", "GFLOP/s", ",.0f", 1e-9),
    Column("bfloat16_flops_per_s", "torch.mm bf16, GFLOP/s", ",.0f", 1e-9),
    Column("float32_flops_per_s", "torch.mm f32, GFLOP/s", ",.0f", 1e-9),
    Column("matmul_fraction", "fraction of torch.mm bf16", ".2f"),
)
_TORCH = (Column("torch_s", "F.linear bf16, ms", ".3f", 1e3), Column("speedup", "speedup over F.linear", ".2f"))
_MEMORY = (
    "memory: rate of the read kernel over 512 MiB, measured in turn with the kernel. fraction of memory rate: GB/s "
    "divided by memory."
)
_MATMUL = (
    "torch.mm: rate of square matrix products, measured in turn with the kernel. The bf16 rate is measured in "
    "float32 if float32 is faster."
)


@dataclass(frozen=True)
class _Table:
    title: str
    note: str
    columns: tuple[Column, ...]
    plot: Plot | None = None


TABLES = {
    "attention": _Table(
        "Decode attention: one query row over a long KV cache",
        f"GB/s: bytes of the KV, including scales, divided by the time. {_MEMORY}",
        (
            Column("kv_dtype", "KV"),
            Column("attention_dtype", "--attention-dtype"),
            Column("head_size", "head size", "d"),
            *_HEADS,
            _CONTEXT,
            _THREADS,
            *_TIME,
            *_RATE,
        ),
        Plot(("fraction",), ("kv_dtype", "attention_dtype", "head_size", "num_query_heads", "threads")),
    ),
    "latent": _Table(
        "Decode attention with absorbed MLA in bfloat16: keys of 576 elements, of which the first 512 are the values",
        f"GB/s: bytes of the latents, counted once for keys and values, divided by the time. {_MEMORY} {_MATMUL}",
        (*_HEADS, _CONTEXT, _THREADS, *_TIME, *_RATE, *_ARITHMETIC),
    ),
    "products": _Table(
        "Matrix products of one row",
        "The products run over copies of the weight that together do not fit in any cache. GB/s: bytes of the weight, "
        f"including scales, divided by the time. {_MEMORY} F.linear: torch's product of the same shape, over copies in "
        "bfloat16.",
        (*_WEIGHT, _THREADS, *_TIME, *_RATE, *_TORCH),
        Plot(("fraction",), ("weight_dtype", "outputs", "depth", "threads")),
    ),
    "chunk_attention": _Table(
        "Attention of a prefill chunk in bfloat16",
        "Causal attention of the last rows of a context. GFLOP/s counts only the operations that causal attention "
        f"needs. {_MATMUL}",
        (
            Column("head_size", "head size", "d"),
            *_HEADS,
            Column("rows", "rows", "d"),
            _CONTEXT,
            _THREADS,
            *_TIME,
            *_ARITHMETIC,
        ),
    ),
    "chunk_products": _Table(
        "Matrix products of a prefill chunk",
        f"F.linear: torch's product of the same shape in bfloat16. {_MATMUL}",
        (*_WEIGHT, Column("rows", "rows", "d"), _THREADS, *_TIME, *_ARITHMETIC, *_TORCH),
    ),
}


def sections_of(rows: list[Row]) -> list[Section]:
    """Create a table for each kind of kernel. The key "part" of a row is its kind."""
    return [
        Section(
            name=f"kernels_{kind}",
            title=table.title,
            note=table.note,
            columns=table.columns,
            rows=found,
            plot=table.plot,
        )
        for kind, table in TABLES.items()
        if (found := [row for row in rows if row["part"] == kind])
    ]
