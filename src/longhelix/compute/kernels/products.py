"""Products of rows with weights, rounding of rows to bytes, and selection of rows."""

import torch
from torch import Tensor

from longhelix.compute.kernels import native, reference
from longhelix.compute.kernels.library import (
    activation_arguments,
    activation_of,
    dense,
    dense_rows,
    is_compiling,
    library,
    triton_kernels,
)
from longhelix.compute.kernels.operands import check_operands, num_blocks
from longhelix.compute.kernels.packed_rows import PackedRows
from longhelix.compute.kernels.weight import ARRANGEMENTS, PACKED, PANELS, Weight
from longhelix.spec import Activation


def linear(
    x_TX: Tensor,
    weight: Weight,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    norm_eps: float = 0.0,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    scales_TX: Tensor | None = None,
) -> Tensor:
    """Return x W^T + bias, fused with the operations around it.

    Args:
        norm: Weight of an RMSNorm (arXiv 1910.07467) of x before the product. In the dtype of x, or in float32.
        activation: Applied to the product. If it is gated, the first half of the outputs gates the second.
        residual: Added last. Any dtype.
        dtype: Dtype of the result. None: that of x, which must not be int8.
        scales_TX: Scales of x_TX, if it has int8 rows of `quantise_rows`. Needs a w8a8 weight and no norm. A w8a8
        weight
            rounds other rows to the same numbers.

    Raises:
        ValueError: An operand has the wrong shape or dtype.
    """
    dtype = dtype or x_TX.dtype
    if weight.order is not None:
        x_TX, norm = _in_order(x_TX, norm, weight.order)
    if weight.arrangement is PANELS and not is_compiling():
        return _multiply_panels(x_TX, weight, bias, norm, norm_eps, activation, residual, dtype, scales_TX)
    return torch.ops.longhelix.linear(
        x_TX,
        weight.values,
        bias,
        norm,
        norm_eps,
        *activation_arguments(activation),
        residual,
        dtype,
        scales_TX,
        *_weight_arguments(weight),
    )


def _in_order(x_TX, norm, order):
    """Return x and the norm's weight with their columns in order.

    A norm divides all numbers of a row by one number, so they may be in any order. Only whole rows are normed, in which
    each column is taken once.
    """
    assert norm is None or len(order.columns_I) == order.num_columns
    if x_TX.shape[1] != order.num_columns or (norm is not None and norm.shape != x_TX.shape[1:]):
        raise ValueError(f"a weight takes rows and norms of {order.num_columns} numbers, but rows have {x_TX.shape[1]}")
    x_TI = take_columns(x_TX, order.columns_I)
    return x_TI, None if norm is None else take_columns(norm.unsqueeze(0), order.columns_I).squeeze(0)


library.define(
    "linear(Tensor x_TX, Tensor values, Tensor? bias, Tensor? norm, float norm_eps, str function, bool gated, "
    "Tensor? residual, ScalarType dtype, Tensor? scales_TX, str weight_dtype, int outputs, int depth, "
    "str arrangement, int lead, bool rounds_inputs) -> Tensor"
)


def _linear(x_TX, values, bias, norm, norm_eps, function, gated, residual, dtype, scales_TX, *weight):
    activation = activation_of(function, gated)
    weight_dtype, outputs, depth, arrangement, lead, rounds_inputs = weight
    weight = Weight(
        values,
        weight_dtype,
        outputs,
        depth,
        arrangement=ARRANGEMENTS[arrangement],
        lead=lead,
        rounds_inputs=rounds_inputs,
    )
    if weight.arrangement is PANELS:
        return _multiply_panels(x_TX, weight, bias, norm, norm_eps, activation, residual, dtype, scales_TX)
    if scales_TX is not None:
        raise ValueError("scales apply only to int8 rows with a w8a8 weight in panels: leave them out otherwise")
    _check(x_TX, weight, bias, norm, activation, residual, dtype, scales_TX)
    operand = PACKED.rows_of(weight) if weight.arrangement is PACKED else values
    if x_TX.is_cuda:
        return _multiply_on_gpu(x_TX, operand, bias, norm, norm_eps, activation, residual, dtype, rounds_inputs)
    return reference.linear(x_TX, operand, bias, norm, norm_eps, activation, residual, dtype, rounds_inputs)


def _multiply_on_gpu(x_TX, operand, bias, norm, norm_eps, activation, residual, dtype, rounds_inputs):
    """Run the reference, or the kernels of packed weights, with one launch for the norm and one for the activation.

    operand: W as a tensor or as `PackedRows`.
    """
    if norm is not None:
        x_TX, norm = triton_kernels().norm_rows(dense_rows(x_TX), norm, norm_eps), None
    if isinstance(operand, PackedRows):
        product_dtype = dtype if activation is None and residual is None else x_TX.dtype
        out_TO = triton_kernels().multiply_packed(x_TX, operand, product_dtype, bias, rounds_inputs)
    elif activation is None:
        return reference.linear(x_TX, operand, bias, norm, norm_eps, None, residual, dtype)
    else:
        product_dtype = torch.promote_types(x_TX.dtype, operand.dtype)
        out_TO = reference.linear(x_TX, operand, bias, norm, norm_eps, None, None, product_dtype)
    if activation is not None:
        out_TO = triton_kernels().activate_rows(out_TO, activation)
    return (out_TO if residual is None else out_TO + residual).to(dtype)


def _num_outputs(outputs, activation):
    """Return the outputs of a product that are left after an activation."""
    return outputs if activation is None else outputs // activation.projections


def _check(x_TX, weight, bias, norm, activation, residual, dtype, scales_TX):
    outputs = _num_outputs(weight.outputs, activation)
    check_operands(x_TX, weight.dtype, weight.depth, outputs, norm, residual, dtype, scales_TX)
    if bias is not None and bias.shape != (weight.outputs,):
        raise ValueError(
            f"{weight.outputs} outputs have a bias of shape {tuple(bias.shape)}: give it one value per output"
        )
    if bias is not None and scales_TX is None and bias.dtype != x_TX.dtype:
        raise ValueError(f"rows of {x_TX.dtype} have a bias of {bias.dtype}: give both the same dtype")


def _multiply_panels(x_TX, weight, bias, norm, norm_eps, activation, residual, dtype, scales_TX):
    _check(x_TX, weight, bias, norm, activation, residual, dtype, scales_TX)
    rows, outputs = x_TX.shape[0], _num_outputs(weight.outputs, activation)
    if norm is not None and norm.dtype != x_TX.dtype:
        x_TX, norm = reference.rms_norm(x_TX, norm, norm_eps), None
    x_TX, norm, bias, scales_TX = dense_rows(x_TX), dense(norm), dense(bias), dense(scales_TX)
    if scales_TX is not None and bias is not None:
        bias = bias.to(dtype)  # other kernels use the dtype of x
    if residual is not None:
        residual = dense_rows(residual if residual.dtype == dtype else residual.to(dtype))
    out_TX = x_TX.new_empty(rows, outputs, dtype=dtype)
    number = native.module.Number.int8 if x_TX.dtype == torch.int8 else native.NUMBER_BY_DTYPE[x_TX.dtype]
    native.module.linear(
        x_TX.data_ptr(),
        number,
        x_TX.stride(0),
        0 if scales_TX is None else scales_TX.data_ptr(),
        rows,
        0 if norm is None else norm.data_ptr(),
        norm_eps,
        weight.handle,
        0 if bias is None else bias.data_ptr(),
        *native.activation(activation),
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        out_TX.data_ptr(),
        native.NUMBER_BY_DTYPE[dtype],
        outputs,
    )
    return out_TX


@torch.library.register_fake("longhelix::linear", lib=library)
def _(x_TX, values, bias, norm, norm_eps, function, gated, residual, dtype, scales_TX, weight_dtype, outputs, *_):
    return x_TX.new_empty(x_TX.shape[0], _num_outputs(outputs, activation_of(function, gated)), dtype=dtype)


def quantise_rows(x_TX: Tensor, *, norm: Tensor | None = None, norm_eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """Round rows to bytes, x = scale * q.

    The largest magnitude of a scale block becomes 127. Others are rounded to nearest, ties to even. A block below
    2^-112 becomes 0. A block with an infinity or a NaN gets a NaN as its scale.

    Args:
        norm: As in `linear`.

    Returns:
        q_TX (int8, -127 to 127), and the scale of each scale block of 64 inputs, scales_TX (float32).
    """
    if not is_compiling() and _rounds_natively(x_TX, norm):
        return _round_rows(x_TX, norm, norm_eps)
    return torch.ops.longhelix.quantise_rows(x_TX, norm, norm_eps)


library.define("quantise_rows(Tensor x_TX, Tensor? norm, float norm_eps) -> (Tensor, Tensor)")


def _quantise_rows(x_TX, norm, norm_eps):
    if _rounds_natively(x_TX, norm):
        return _round_rows(x_TX, norm, norm_eps)
    return reference.quantise_rows(x_TX if norm is None else reference.rms_norm(x_TX, norm, norm_eps))


def _rounds_natively(x_TX, norm):
    on_cpu = native.module is not None and not x_TX.is_cuda
    return on_cpu and x_TX.shape[1] % native.LANES == 0 and (norm is None or norm.dtype == x_TX.dtype)


def _round_rows(x_TX, norm, norm_eps):
    x_TX, norm = dense_rows(x_TX), dense(norm)
    q_TX = x_TX.new_empty(x_TX.shape, dtype=torch.int8)
    scales_TX = x_TX.new_empty(len(x_TX), num_blocks(x_TX.shape[1]), dtype=torch.float32)
    native.module.round(
        x_TX.data_ptr(),
        native.NUMBER_BY_DTYPE[x_TX.dtype],
        x_TX.stride(0),
        *x_TX.shape,
        0 if norm is None else norm.data_ptr(),
        norm_eps,
        q_TX.data_ptr(),
        scales_TX.data_ptr(),
    )
    return q_TX, scales_TX


@torch.library.register_fake("longhelix::quantise_rows", lib=library)
def _(x_TX, norm, norm_eps):
    rows, depth = x_TX.shape
    return x_TX.new_empty(rows, depth, dtype=torch.int8), x_TX.new_empty(rows, num_blocks(depth), dtype=torch.float32)


def take_rows(x_TX: Tensor, rows_t: Tensor) -> Tensor:
    """Return the rows `rows_t` (int64) of x_TX, in that order: x_tX."""
    if native.module is not None and not x_TX.is_cuda and not is_compiling():
        return _copy_rows(x_TX, rows_t)
    return torch.ops.longhelix.take_rows(x_TX, rows_t)


library.define("take_rows(Tensor x_TX, Tensor rows_t) -> Tensor")


def _take_rows(x_TX, rows_t):
    return x_TX.index_select(0, rows_t)


def _copy_rows(x_TX, rows_t):
    x_TX = dense_rows(x_TX)
    x_tX = x_TX.new_empty(len(rows_t), x_TX.shape[1])
    native.module.take_rows(
        x_TX.data_ptr(),
        x_TX.stride(0) * x_TX.element_size(),
        x_TX.shape[1] * x_TX.element_size(),
        rows_t.data_ptr(),
        len(rows_t),
        x_tX.data_ptr(),
    )
    return x_tX


@torch.library.register_fake("longhelix::take_rows", lib=library)
def _(x_TX, rows_t):
    return x_TX.new_empty(rows_t.shape[0], x_TX.shape[1])


def take_columns(x_TX: Tensor, columns_I: Tensor) -> Tensor:
    """Return the columns `columns_I` (int32) of x_TX (floats), in that order: x_TI. Column -1 is zero."""
    if native.module is not None and not x_TX.is_cuda and not is_compiling():
        return _copy_columns(x_TX, columns_I)
    return torch.ops.longhelix.take_columns(x_TX, columns_I)


library.define("take_columns(Tensor x_TX, Tensor columns_I) -> Tensor")


def _take_columns(x_TX, columns_I):
    return x_TX.index_select(1, columns_I.clamp(min=0)).masked_fill(columns_I < 0, 0.0)


def _copy_columns(x_TX, columns_I):
    x_TX = dense_rows(x_TX)
    x_TI = x_TX.new_empty(len(x_TX), len(columns_I))
    native.module.take_columns(
        x_TX.data_ptr(),
        x_TX.stride(0),
        native.NUMBER_BY_DTYPE[x_TX.dtype],
        columns_I.data_ptr(),
        len(columns_I),
        len(x_TX),
        x_TI.data_ptr(),
    )
    return x_TI


@torch.library.register_fake("longhelix::take_columns", lib=library)
def _(x_TX, columns_I):
    return x_TX.new_empty(x_TX.shape[0], columns_I.shape[0])


library.impl("linear", _linear, "CompositeExplicitAutograd")
library.impl("quantise_rows", _quantise_rows, "CompositeExplicitAutograd")
library.impl("take_rows", _take_rows, "CompositeExplicitAutograd")
library.impl("take_columns", _take_columns, "CompositeExplicitAutograd")


def _weight_arguments(weight: Weight) -> tuple[str, int, int, str, int, bool]:
    shape = weight.outputs, weight.depth
    return weight.dtype, *shape, weight.arrangement.name, weight.lead, weight.rounds_inputs
