"""Measures the peak rates of this machine at which it reads memory and multiplies matrices.

Reports compare other measurements with these rates.
"""

from collections.abc import Callable

import torch

from longhelix.compute.kernels import native
from longhelix.errors import UserError
from longhelix.measure.timing import seconds

READ_BYTES = 1 << 29  # larger than the caches of most servers
DTYPES = ("bfloat16", "float32")  # dtypes of the multiplied matrices
SQUARE = 1024  # number of rows of the square matrices that measure the arithmetic peak
SQUARES = 4  # number of matrix products in one measurement
PROBE = 256  # number of rows of the square matrices that find the faster dtype


def check_native() -> None:
    """Raise UserError if the native kernels are not installed."""
    if native.module is None:
        raise UserError(
            "measurements need the native kernels, which are not installed: install a compiler and run `make setup`"
        )


def reader(num_bytes: int) -> Callable[[], object]:
    """Return a function that reads `num_bytes` bytes of memory as fast as the machine can."""
    memory = torch.ones(num_bytes, dtype=torch.uint8)
    return lambda: native.module.read(memory.data_ptr(), memory.nbytes)


def multiplier(dtype: torch.dtype) -> Callable[[], object]:
    """Return a function that multiplies SQUARES pairs of square matrices with torch.mm.

    The matrices have the dtype `dtype`. They are in float32 if that is faster, as on CPUs without bfloat16 arithmetic.
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
    """Number of floating-point operations in one call of a `multiplier`."""
    return SQUARES * 2 * SQUARE**3
