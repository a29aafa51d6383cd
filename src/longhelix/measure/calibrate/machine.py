"""Measurements of the machine itself, without a model."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import torch

from longhelix.compute.kernels import Weight, linear, make_weight, native
from longhelix.compute.kernels.tape import Tape
from longhelix.compute.machine import host
from longhelix.measure import memory
from longhelix.measure.formulas import linear_flops
from longhelix.measure.timing import interleave
from longhelix.measure.world import Row

TINY_KERNELS = 256
NARROW_DTYPES = ("int8", "int4", "w8a8")
PRODUCT_DTYPES = ("float32", "bfloat16", *NARROW_DTYPES)
PRODUCT_ROWS = (1, 16, 128, 512)  # numbers of rows: those of decode steps and those of prefill chunks
_PRODUCT_SIZE = 2048


class MachineJob(msgspec.Struct, frozen=True):
    """Job of one process: measures the fixed cost of a kernel, and float32 matrix products on all threads."""

    repeats: int

    @torch.inference_mode()
    def measure(self, rank: int, directory: Path) -> Iterator[Row]:
        native.set_num_threads(host.cores())
        calls = {"kernels": _tiny_kernels(), "matmul": memory.multiplier(torch.float32)}
        timings = interleave(calls, self.repeats)
        yield {
            "kernel_s": timings["kernels"].median_s / TINY_KERNELS,
            "flops_per_s.float32": memory.multiplier_flops() / timings["matmul"].median_s,
        }


class ProductsJob(msgspec.Struct, frozen=True):
    """Job of one process: measures the engine's matrix products on all threads, by weight dtype and number of rows."""

    repeats: int

    @torch.inference_mode()
    def measure(self, rank: int, directory: Path) -> Iterator[Row]:
        native.set_num_threads(host.cores())
        weights = {dtype: _square(dtype) for dtype in PRODUCT_DTYPES}
        for rows in PRODUCT_ROWS:
            x_TX = torch.randn(rows, _PRODUCT_SIZE).bfloat16()
            calls = {
                dtype: partial(linear, x_TX.float() if dtype == "float32" else x_TX, weight)
                for dtype, weight in weights.items()
            }
            for dtype, timing in interleave(calls, self.repeats).items():
                flops = linear_flops(rows, _PRODUCT_SIZE, _PRODUCT_SIZE)
                yield {"weight_dtype": dtype, "rows": rows, "flops_per_s": flops / timing.median_s}


def _square(dtype: str) -> Weight:
    values = torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE)
    return make_weight(values if dtype == "float32" else values.bfloat16(), dtype)


def _tiny_kernels() -> Callable[[], None]:
    """Create a tape of TINY_KERNELS matrix products.

    The products are so small that their time is the fixed cost of a kernel.
    """
    weight, x_TX, tape = make_weight(torch.randn(16, 32).bfloat16(), "bfloat16"), torch.randn(1, 32).bfloat16(), Tape()
    with tape:
        for _ in range(TINY_KERNELS):
            linear(x_TX, weight)
    return tape.run
