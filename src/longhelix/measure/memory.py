"""Peak rates of this machine, to compare measurements with: reading memory and multiplying matrices."""

from collections.abc import Callable

import torch

from longhelix.compute.kernels import native
from longhelix.errors import UserError
from longhelix.measure.timing import seconds

READ_BYTES = 1 << 29  # larger than the caches of most servers
DTYPES = ("bfloat16", "float32")  # dtypes of the multiplied matrices
SQUARE = 1024  # rows of the square matrices that measure the arithmetic peak
SQUARES = 4  # number of matrix products in one measurement
PROBE = 256  # rows of the matrices that are used to find the faster dtype


def check_native() -> None:
    """Raise UserError if the native kernels are not installed."""
    if native.module is None:
        raise UserError(
            "measurements need the native kernels, which this installation lacks: run `make setup` with a compiler"
        )


def reader(num_bytes: int) -> Callable[[], object]:
    """Create a call that reads `num_bytes` bytes of memory as fast as the machine can."""
    memory = torch.ones(num_bytes, dtype=torch.uint8)
    return lambda: native.module.read(memory.data_ptr(), memory.nbytes)


def multiplier(dtype: torch.dtype) -> Callable[[], object]:
    """Create a call that multiplies SQUARES pairs of square matrices with torch.mm.

    The matrices have the dtype `dtype`, or float32 if float32 is faster, as on CPUs without bfloat16 arithmetic.
    """
    fastest = min(dtype, torch.float32, key=lambda each: min(seconds(_products(each, 1, PROBE)) for _ in range(3)))
    return _products(fastest, SQUARES, SQUARE)


def _products(dtype: torch.dtype, count: int, size: int) -> Callable[[], None]:
    left, right = torch.randn(2, size, size).to(dtype)
    out = torch.empty_like(left)

    def multiply() -> None:
        for _ in range(count):
            torch.mm(left, right, out=out)

    return multiply


def multiplier_flops() -> int:
    """Floating-point operations of one call of a `multiplier`."""
    return SQUARES * 2 * SQUARE**3
