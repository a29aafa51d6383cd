"""Writes keys and values into the pool, and rotates queries and keys."""

import torch
from torch import Tensor

from longhelix.compute.kernels import native, reference
from longhelix.compute.kernels.layer import TILES, KVLayer
from longhelix.compute.kernels.library import (
    dense,
    dense_rows,
    format_arguments,
    is_compiling,
    layer_of,
    library,
    triton_kernels,
)
from longhelix.compute.kernels.numbers import STORED, rotated_channels


def write_kv(k_TkC: Tensor, v_TkC: Tensor | None, layer: KVLayer, slots_T: Tensor) -> None:
    """Write the rows that this rank owns into one layer's pool, quantised as the pool's dtype asks.

    Args:
        v_TkC: None: values are the first channels of the keys.
        slots_T: Block id * D + offset in the block, or -1 for a row that another rank owns. int64.
    """
    if layer.format.arrangement is TILES and not is_compiling():
        return _write_tiles(k_TkC, v_TkC, layer, slots_T)
    return torch.ops.longhelix.write_kv(k_TkC, v_TkC, layer.values, layer.scales, slots_T, *format_arguments(layer))


library.define(
    "write_kv(Tensor k_TkC, Tensor? v_TkC, Tensor(a!) values, Tensor(b!)? scales, Tensor slots_T, "
    "str arrangement, str dtype, int value_size, bool shared_values, bool rounded) -> ()"
)


def _write_kv(k_TkC, v_TkC, values, scales, slots_T, *format):
    layer = layer_of(values, scales, k_TkC.shape[-1], *format)
    if layer.format.arrangement is TILES:
        _write_tiles(k_TkC, v_TkC, layer, slots_T)
        return
    v_TkC = None if layer.format.shared_values else v_TkC
    k_TkC = rotated_channels(k_TkC) if layer.format.rotates_keys else k_TkC
    if k_TkC.is_cuda and layer.format.dtype in triton_kernels().FORMATS:
        triton_kernels().write_kv(k_TkC, v_TkC, values, scales, slots_T)
        return
    for array, x_TkC in enumerate((k_TkC,) if v_TkC is None else (k_TkC, v_TkC)):
        stored_TkX, scales_TkG = STORED[layer.format.dtype].encode(x_TkC, layer.format.scales)
        reference.write_rows(stored_TkX, values[:, array], slots_T)
        if scales_TkG is not None:
            reference.write_rows(scales_TkG, scales[:, array], slots_T)


def _write_tiles(k_TkC, v_TkC, layer, slots_T):
    k_TX = dense_rows(k_TkC)
    v_TX = k_TX if v_TkC is None else dense_rows(v_TkC)
    slots_T = slots_T.contiguous()
    native.module.write(
        k_TX.data_ptr(),
        k_TX.stride(0),
        v_TX.data_ptr(),
        v_TX.stride(0),
        native.NUMBER_BY_DTYPE[k_TkC.dtype],
        layer.handle,
        slots_T.data_ptr(),
        len(slots_T),
    )


@torch.library.register_fake("longhelix::write_kv", lib=library)
def _(k_TkC, v_TkC, values, scales, slots_T, *format):
    return None


def rotate_and_write(
    qkv_TX: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    norm_eps: float,
    cos_TR: Tensor,
    sin_TR: Tensor,
    layer: KVLayer,
    slots_T: Tensor,
) -> Tensor:
    """Rotate queries and keys, and write keys and values into the pool. Returns rotated queries, q_TqC.

    Args:
        qkv_TX: Query heads, key heads, value heads.
        q_norm: Weights of an RMSNorm of each query head. In the dtype of qkv_TX, or in float32.
        k_norm: Weights of an RMSNorm of each key head. As q_norm.
        cos_TR: R <= C/2. Channel r is rotated with channel R + r (arXiv 2104.09864), channels from 2R on are not
            rotated. float32.
        sin_TR: As cos_TR.
        slots_T: As in `write_kv`.
    """
    if layer.format.arrangement is TILES and not is_compiling():
        return _rotate_tiles(qkv_TX, q_norm, k_norm, norm_eps, cos_TR, sin_TR, layer, slots_T)
    return torch.ops.longhelix.rotate_and_write(
        qkv_TX,
        q_norm,
        k_norm,
        norm_eps,
        cos_TR,
        sin_TR,
        layer.values,
        layer.scales,
        slots_T,
        layer.format.num_kv_heads,
        *format_arguments(layer),
    )


library.define(
    "rotate_and_write(Tensor qkv_TX, Tensor? q_norm, Tensor? k_norm, float norm_eps, Tensor cos_TR, Tensor sin_TR, "
    "Tensor(a!) values, Tensor(b!)? scales, Tensor slots_T, int num_kv_heads, str arrangement, str dtype, "
    "int value_size, bool shared_values, bool rounded) -> Tensor"
)


def _rotate_and_write(qkv_TX, q_norm, k_norm, norm_eps, cos_TR, sin_TR, values, scales, slots_T, num_kv_heads, *format):
    value_size = format[2]
    layer = layer_of(values, scales, value_size, *format)
    if layer.format.arrangement is TILES:
        return _rotate_tiles(qkv_TX, q_norm, k_norm, norm_eps, cos_TR, sin_TR, layer, slots_T)
    norms_fit = all(norm is None or norm.dtype in (qkv_TX.dtype, torch.float32) for norm in (q_norm, k_norm))
    on_gpu = qkv_TX.is_cuda and qkv_TX.dtype != torch.float64 and norms_fit
    rotate, qkv_TX = (triton_kernels().rotate, dense_rows(qkv_TX)) if on_gpu else (reference.rotate, qkv_TX)
    q_TqC, k_TkC, v_TkC = rotate(qkv_TX, num_kv_heads, value_size, q_norm, k_norm, norm_eps, cos_TR, sin_TR)
    _write_kv(k_TkC, v_TkC, values, scales, slots_T, *format)
    return q_TqC


def _rotate_tiles(qkv_TX, q_norm, k_norm, norm_eps, cos_TR, sin_TR, layer, slots_T):
    format = layer.format
    if any(norm is not None and norm.dtype != qkv_TX.dtype for norm in (q_norm, k_norm)):
        rotation = q_norm, k_norm, norm_eps, cos_TR, sin_TR
        q_TqC, k_TkC, v_TkC = reference.rotate(qkv_TX, format.num_kv_heads, format.key_size, *rotation)
        _write_tiles(k_TkC, v_TkC, layer, slots_T)
        return q_TqC
    num_query_heads = qkv_TX.shape[1] // format.key_size - 2 * format.num_kv_heads
    qkv_TX = dense_rows(qkv_TX)
    q_norm, k_norm, cos_TR, sin_TR, slots_T = map(dense, (q_norm, k_norm, cos_TR, sin_TR, slots_T))
    q_TqC = qkv_TX.new_empty(len(qkv_TX), num_query_heads, format.key_size)
    native.module.rotate(
        qkv_TX.data_ptr(),
        qkv_TX.stride(0),
        native.NUMBER_BY_DTYPE[qkv_TX.dtype],
        0 if q_norm is None else q_norm.data_ptr(),
        0 if k_norm is None else k_norm.data_ptr(),
        norm_eps,
        cos_TR.data_ptr(),
        sin_TR.data_ptr(),
        cos_TR.shape[1],
        layer.handle,
        num_query_heads,
        slots_T.data_ptr(),
        len(slots_T),
        q_TqC.data_ptr(),
    )
    return q_TqC


@torch.library.register_fake("longhelix::rotate_and_write", lib=library)
def _(qkv_TX, q_norm, k_norm, norm_eps, cos, sin, values, scales, slots, num_kv_heads, *format):
    value_size = format[2]
    return qkv_TX.new_empty(qkv_TX.shape[0], qkv_TX.shape[1] // value_size - 2 * num_kv_heads, value_size)


library.impl("write_kv", _write_kv, "CompositeExplicitAutograd")
library.impl("rotate_and_write", _rotate_and_write, "CompositeExplicitAutograd")
