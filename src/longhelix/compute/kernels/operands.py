"""Arguments of matrix products and experts other than weights.

Native kernels read memory as what they are told it is. Operands of another dtype or shape are refused before, in words,
whatever form of an op runs: where ops are implemented, which no graph traces.
"""

import torch
from torch import Tensor

from longhelix.compute.kernels.reference import ROW_BLOCK
from longhelix.spec import FORMATS

_FLOATS = frozenset((torch.float32, torch.bfloat16, torch.float16))


def check_operands(
    x_TX: Tensor,
    weight_dtype: str | None,
    depth: int | None,
    outputs: int | None,
    norm: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
    scales_TX: Tensor | None,
) -> None:
    """Raises ValueError if weights of `weight_dtype` with so many inputs and outputs do not take these, or not for a
    result of `dtype`. None, of a rank without weights: what x has. A residual may be of any dtype."""
    shape = x_TX.shape
    if len(shape) != 2:
        raise ValueError(f"rows have shape {tuple(shape)}: give them two dimensions, (rows, inputs)")
    rows, width = shape
    depth = width if depth is None else depth
    if scales_TX is not None:
        _check_scales(x_TX, weight_dtype, depth, norm, scales_TX)
    if dtype not in _FLOATS:
        raise ValueError(f"a product cannot have the dtype {dtype}: set dtype to float32, bfloat16 or float16")
    if scales_TX is None and x_TX.dtype not in _FLOATS:
        raise ValueError(
            f"rows of {x_TX.dtype} have no scales: give rows of float32, bfloat16 or float16, or of int8 with scales"
        )
    if width != depth:
        raise ValueError(f"rows have {width} inputs, but the weight takes {depth}: give the same number")
    if norm is not None and norm.dtype not in (x_TX.dtype, torch.float32):
        raise ValueError(
            f"rows of {x_TX.dtype} have a norm of {norm.dtype}: give both the same dtype, or a norm of torch.float32"
        )
    if norm is not None and norm.shape != (depth,):
        raise ValueError(
            f"rows of {depth} inputs have a norm of shape {tuple(norm.shape)}: give the norm one weight per input"
        )
    if residual is not None and residual.shape != (rows, wanted := width if outputs is None else outputs):
        raise ValueError(
            f"a result of shape {(rows, wanted)} has a residual of shape {tuple(residual.shape)}: give both the same "
            "shape"
        )


def _check_scales(x_TX, weight_dtype, depth, norm, scales_TX):
    rounds_inputs = weight_dtype is None or FORMATS[weight_dtype].arithmetic.rounds_inputs
    if x_TX.dtype != torch.int8 or not rounds_inputs or norm is not None:
        raise ValueError("scales apply only to int8 rows with a w8a8 weight and no norm: leave them out otherwise")
    rows, width = x_TX.shape
    wanted = rows, num_blocks(depth)
    if width != depth or scales_TX.dtype != torch.float32 or scales_TX.shape != wanted:
        raise ValueError(
            f"rows of {width} bytes have scales of {scales_TX.dtype} and shape {tuple(scales_TX.shape)}, but "
            f"the weight takes rows of {depth} bytes, and scales of torch.float32 and shape {wanted}"
        )


def check_taken(weights_TY: Tensor, experts_TY: Tensor, rows: int) -> None:
    """Raises ValueError if these are not what `route` gives for so many rows. Any number may name an expert."""
    if weights_TY.dtype != torch.float32 or experts_TY.dtype != torch.int64:
        raise ValueError(
            f"expert weights have the dtype {weights_TY.dtype} and expert ids {experts_TY.dtype}: give weights in "
            "torch.float32 and ids in torch.int64"
        )
    shape = experts_TY.shape
    if len(shape) != 2 or shape[0] != rows or weights_TY.shape != shape:
        raise ValueError(
            f"for {rows} rows, expert weights have the shape {tuple(weights_TY.shape)} and expert ids {tuple(shape)}: "
            "give both one row per row of inputs"
        )


def num_blocks(depth: int) -> int:
    """Return the number of scale blocks of a row of bytes."""
    return -(-depth // ROW_BLOCK)
