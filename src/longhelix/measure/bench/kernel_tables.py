"""Tables of the native kernels: titles, notes and columns."""

from dataclasses import dataclass

from longhelix.measure.bench.section import Column, Plot, Section
from longhelix.measure.world import Row

_THREADS = Column("threads", "threads", "d")
_CONTEXT = Column("context", "context", ",d")
_HEADS = (Column("num_query_heads", "query heads", "d"), Column("num_kv_heads", "KV heads", "d"))
_WEIGHT = (Column("weight_dtype", "weights"), Column("outputs", "outputs", "d"), Column("depth", "inputs", "d"))
_TIME = (Column("time_s", "time, ms", ".3f", 1e3), Column("spread", "spread, %", ".0f", 100))
_RATE = (
    Column("bytes_per_s", "GB/s", ".1f", 1e-9),
    Column("memory_bytes_per_s", "memory, GB/s", ".1f", 1e-9),
    Column("fraction", "fraction", ".2f"),
)
_ARITHMETIC = (
    Column("flops_per_s", "GFLOP/s", ",.0f", 1e-9),
    Column("bfloat16_flops_per_s", "torch.mm bf16", ",.0f", 1e-9),
    Column("float32_flops_per_s", "torch.mm f32", ",.0f", 1e-9),
    Column("matmul_fraction", "fraction of bf16", ".2f"),
)
_TORCH = (Column("torch_s", "F.linear bf16, ms", ".3f", 1e3), Column("speedup", "times faster", ".2f"))
_MEMORY = "memory: rate of the read kernel over 512 MiB, in turn with the kernel. fraction: GB/s divided by memory."
_MATMUL = "torch.mm: GFLOP/s of square matrices, in turn with the kernel. bf16 runs in float32 if that is faster."


@dataclass(frozen=True)
class _Table:
    title: str
    note: str
    columns: tuple[Column, ...]
    plot: Plot | None = None


TABLES = {
    "attention": _Table(
        "Decode attention: one row against a long KV",
        f"GB/s: bytes of the KV, including scales. {_MEMORY}",
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
        "Decode attention, MLA absorbed: keys of 576, values their first 512, bfloat16",
        f"GB/s: bytes of the latent, counted once. {_MEMORY} {_MATMUL}",
        (*_HEADS, _CONTEXT, _THREADS, *_TIME, *_RATE, *_ARITHMETIC),
    ),
    "products": _Table(
        "Products of one row",
        "Products over copies of the weight that do not fit in any cache. GB/s: bytes of the weight, including scales. "
        f"{_MEMORY} F.linear: torch's product of the same shape, over bfloat16 copies.",
        (*_WEIGHT, _THREADS, *_TIME, *_RATE, *_TORCH),
        Plot(("fraction",), ("weight_dtype", "outputs", "depth", "threads")),
    ),
    "chunk_attention": _Table(
        "Attention of a prefill chunk, bfloat16",
        "The last rows of a context with causal attention. GFLOP/s counts the operations that causal attention needs. "
        f"{_MATMUL}",
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
        "Products of a prefill chunk",
        f"F.linear: torch's product of the same shape in bfloat16. {_MATMUL}",
        (*_WEIGHT, Column("rows", "rows", "d"), _THREADS, *_TIME, *_ARITHMETIC, *_TORCH),
    ),
}


def sections_of(rows: list[Row]) -> list[Section]:
    """Create a table for each kind of row. The value of the key "part" is the kind of the row."""
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
