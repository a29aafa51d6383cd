"""Measures native kernels.

Each kernel runs in turn with the operation that bounds its speed: reading memory or multiplying matrices.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import msgspec
import torch
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.kernels import TILES, KVFormat, linear, make_weight, native, partial_attention
from longhelix.compute.machine.devices import multiplies_integers
from longhelix.errors import UserError
from longhelix.measure import memory
from longhelix.measure.bench.kernel_tables import sections_of
from longhelix.measure.bench.section import Section
from longhelix.measure.formulas import attention_flops, causal_pairs, linear_flops
from longhelix.measure.model import fill
from longhelix.measure.timing import Timing, interleave
from longhelix.measure.world import Row, collect

BLOCK_TOKENS = 16
NUM_KV_HEADS = 2
LATENT_QUERY_HEADS, LATENT_KEY_SIZE, LATENT_VALUE_SIZE = (16, 32, 64, 128), 576, 512
CHUNK_ROWS, CHUNK_CONTEXT = 512, 8192
CHUNK_HEADS = ((9, 3, 64), (32, 8, 128))  # query heads, KV heads, head size
WEIGHT_DTYPES = ("bfloat16", "int8", "int4", "w8a8")
WEIGHT_SHAPES = ((3072, 576), (4096, 4096))  # outputs, inputs

_CPU = torch.device("cpu")
Calls = Mapping[str, Callable[[], object]]


class KernelsJob(msgspec.Struct, frozen=True):
    """Job of one process: measures every kernel with each number of threads."""

    context: int  # number of KV tokens that decode attention reads
    kv_dtypes: tuple[str, ...]
    head_sizes: tuple[int, ...]
    groups: tuple[int, ...]  # query heads per KV head
    threads: tuple[int, ...]
    repeats: int  # number of measured rounds, after a warm-up

    @torch.inference_mode()
    def measure(self, rank: int, directory: Path) -> Iterator[Row]:
        matmul = {name: memory.multiplier(getattr(torch, name)) for name in memory.DTYPES}
        read = {"read": memory.reader(memory.READ_BYTES)}
        for threads in self.threads:
            native.set_num_threads(threads)
            for row in self._rows(read, matmul):
                yield row | {"threads": threads}

    def _rows(self, read: Calls, matmul: Calls) -> Iterator[Row]:
        for dtype, size, group in product(self.kv_dtypes, self.head_sizes, self.groups):
            yield self._attention(read, dtype, size, group)
            if dtype in ("int8", "int4") and multiplies_integers():
                yield self._attention(read, dtype, size, group, rounded=True)
        for num_query_heads in LATENT_QUERY_HEADS:
            yield self._latent(read | matmul, num_query_heads)
        for shape, dtype in product(WEIGHT_SHAPES, WEIGHT_DTYPES):
            yield self._product(read, dtype, *shape)
        for heads in CHUNK_HEADS:
            yield self._chunk_attention(matmul, *heads)
        for shape, dtype in product(WEIGHT_SHAPES, WEIGHT_DTYPES):
            yield self._chunk_product(matmul, dtype, *shape)

    def _attention(self, read: Calls, dtype: str, size: int, group: int, rounded: bool = False) -> Row:
        format = KVFormat.choose(
            dtype,
            block_tokens=BLOCK_TOKENS,
            num_kv_heads=NUM_KV_HEADS,
            key_size=size,
            value_size=size,
            device=_CPU,
            rounded=rounded,
        )
        attention = AttentionCase.over(format, NUM_KV_HEADS * group, 1, self.context)
        timings = interleave({"kernel": attention.run, **read}, self.repeats)
        return {"part": "attention", **attention.row(), **_rate(timings, attention.pool.num_bytes)}

    def _latent(self, bounds: Calls, num_query_heads: int) -> Row:
        sizes = (LATENT_KEY_SIZE, LATENT_VALUE_SIZE)
        format = KVFormat.choose("bfloat16", BLOCK_TOKENS, 1, *sizes, _CPU, shared_values=True)
        attention = AttentionCase.over(format, num_query_heads, 1, self.context)
        timings = interleave({"kernel": attention.run, **bounds}, self.repeats)
        bounded = _rate(timings, attention.pool.num_bytes)
        bounded |= _arithmetic(timings, attention_flops(num_query_heads, *sizes, self.context))
        return {"part": "latent", **attention.row(), **bounded}

    def _product(self, read: Calls, dtype: str, outputs: int, depth: int) -> Row:
        """Measure the memory-bound product of one row, over more copies of the weight than fit in any cache."""
        x_TX, weight_OI = torch.randn(1, depth).bfloat16(), torch.randn(outputs, depth).bfloat16()
        weight = make_weight(weight_OI, dtype)
        copies = [replace(weight, values=weight.values.clone()) for _ in range(_num_copies(weight.values))]
        plain = [weight_OI.clone() for _ in range(_num_copies(weight_OI))]
        calls = {
            "kernel": lambda: [linear(x_TX, copy) for copy in copies],
            "torch": lambda: [torch_linear(x_TX, copy) for copy in plain],
        }
        timings = interleave(calls | read, self.repeats)
        timings |= {"kernel": timings["kernel"].over(len(copies)), "torch": timings["torch"].over(len(plain))}
        shape = {"weight_dtype": dtype, "outputs": outputs, "depth": depth, "rows": 1}
        return {"part": "products", **shape, **_rate(timings, weight.values.nbytes), **_compared_with_torch(timings)}

    def _chunk_attention(self, matmul: Calls, num_query_heads: int, num_kv_heads: int, size: int) -> Row:
        format = KVFormat.choose(
            "bfloat16",
            block_tokens=BLOCK_TOKENS,
            num_kv_heads=num_kv_heads,
            key_size=size,
            value_size=size,
            device=_CPU,
        )
        attention = AttentionCase.over(format, num_query_heads, CHUNK_ROWS, CHUNK_CONTEXT)
        timings = interleave({"kernel": attention.run, **matmul}, self.repeats)
        flops = attention_flops(num_query_heads, size, size, causal_pairs(CHUNK_ROWS, CHUNK_CONTEXT))
        return {"part": "chunk_attention", **attention.row(), **_arithmetic(timings, flops)}

    def _chunk_product(self, matmul: Calls, dtype: str, outputs: int, depth: int) -> Row:
        x_TX, weight_OI = torch.randn(CHUNK_ROWS, depth).bfloat16(), torch.randn(outputs, depth).bfloat16()
        weight = make_weight(weight_OI, dtype)
        calls = {"kernel": lambda: linear(x_TX, weight), "torch": lambda: torch_linear(x_TX, weight_OI)}
        timings = interleave(calls | matmul, self.repeats)
        shape = {"weight_dtype": dtype, "outputs": outputs, "depth": depth, "rows": CHUNK_ROWS}
        flops = linear_flops(CHUNK_ROWS, outputs, depth)
        return {"part": "chunk_products", **shape, **_arithmetic(timings, flops), **_compared_with_torch(timings)}


@dataclass(frozen=True)
class AttentionCase:
    """Inputs of one attention call: queries of the last rows of a context, and one layer of random KV."""

    q_TqC: Tensor  # queries, bfloat16
    pool: KVPool
    context: int  # tokens

    @classmethod
    def over(cls, format: KVFormat, num_query_heads: int, rows: int, context: int) -> "AttentionCase":
        """Create the inputs. Raises UserError if there is no native kernel for the head size."""
        if format.arrangement is not TILES:
            raise UserError(
                f"--head-size has {format.key_size}, but the native kernels need multiples of {native.LANES}: set it "
                "to multiples of this number"
            )
        pool = KVPool([{"kv": format}], -(-context // BLOCK_TOKENS), _CPU)
        fill(pool)
        return cls(torch.randn(rows, num_query_heads, format.key_size).bfloat16(), pool, context)

    def run(self) -> tuple[Tensor, Tensor]:
        """Compute partial attention. Returns the output and its LSE."""
        rows = len(self.q_TqC)
        return partial_attention(
            self.q_TqC,
            self.pool.layers[0]["kv"],
            blocks_X=torch.arange(self.pool.num_blocks),
            extents_B2=torch.tensor([[0, self.pool.num_blocks]]),
            row_starts_B=torch.tensor([0, rows]),
            limits_T=torch.arange(self.context - rows + 1, self.context + 1),
            scale=self.pool.formats[0].key_size ** -0.5,
        )

    def row(self) -> Row:
        """Columns that describe the case."""
        (format,) = self.pool.formats
        return {
            "kv_dtype": format.dtype,
            "attention_dtype": "int8" if format.rounded else "",
            "head_size": format.key_size,
            "num_query_heads": self.q_TqC.shape[1],
            "num_kv_heads": format.num_kv_heads,
            "rows": len(self.q_TqC),
            "context": self.context,
        }


def _num_copies(weight: Tensor) -> int:
    """Number of copies of the weight that together have at least as many bytes as `memory.READ_BYTES`."""
    return -(-memory.READ_BYTES // weight.nbytes)


def _rate(timings: Mapping[str, Timing], num_bytes: int) -> Row:
    """Columns with the rates at which the kernel and the machine read memory."""
    bytes_per_s = num_bytes / timings["kernel"].median_s
    memory_bytes_per_s = memory.READ_BYTES / timings["read"].median_s
    rates = {"read_bytes": num_bytes, "bytes_per_s": bytes_per_s, "memory_bytes_per_s": memory_bytes_per_s}
    return timings["kernel"].row("time_s") | rates | {"fraction": bytes_per_s / memory_bytes_per_s}


def _arithmetic(timings: Mapping[str, Timing], flops: int) -> Row:
    """Columns with the FLOP/s of the kernel and of torch's matrix products."""
    flops_per_s = flops / timings["kernel"].median_s
    peaks = {f"{name}_flops_per_s": memory.multiplier_flops() / timings[name].median_s for name in memory.DTYPES}
    row = timings["kernel"].row("time_s") | {"flops": flops, "flops_per_s": flops_per_s} | peaks
    return row | {"matmul_fraction": flops_per_s / peaks["bfloat16_flops_per_s"]}


def _compared_with_torch(timings: Mapping[str, Timing]) -> Row:
    torch_s = timings["torch"].median_s
    return {"torch_s": torch_s, "speedup": torch_s / timings["kernel"].median_s}


def sections(job: KernelsJob, on_point: Callable[[Row], None]) -> list[Section]:
    """Run the job in a new process. Returns the tables."""
    return sections_of([ranks[0] for ranks in collect(job, 1, on_point)])
