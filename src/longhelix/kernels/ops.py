"""The ops that models call: signatures, shapes (letters in docs/shapes.md) and fakes, so that graphs keep them whole.

LSE is a natural logarithm in float32, everywhere. Registered as torch.ops.longhelix.*. Packed operands run the native
CPU kernels, CUDA tensors the Triton kernels (or FlashInfer's attention, for batches that were prepared for it),
everything else the reference. Outside of a graph a native kernel is called directly: the dispatcher costs more than a
small kernel does.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from longhelix.kernels import flashinfer, native, reference
from longhelix.kernels.layer import NARROW, KVFormat, KVLayer
from longhelix.kernels.weight import Weight

_library = torch.library.Library("longhelix", "DEF")
_is_compiling = torch.compiler.is_compiling


def partial_attention(
    q_TqC: Tensor,
    layer: KVLayer,
    blocks_BJ: Tensor,
    row_starts_B: Tensor,
    limits_T: Tensor,
    scale: float,
    max_rows: int | None = None,
    onto: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of packed rows over this rank's part of their KV, with the log-sum-exp that makes it mergeable.

    q_TqC: rows of B sequences, one after the other. layer: one layer's pool. blocks_BJ (int64): each sequence's local
    KV blocks in position order. row_starts_B (int64, B + 1): the first row of each sequence, then T. limits_T (int64):
    how many local tokens a row sees. max_rows: the most rows of one sequence, which sizes a GPU's launches; None reads
    it back from the GPU. onto: what this op returned for the same rows and other keys; it is merged in, and may be
    overwritten. Returns out_TqC (dtype of q, channels of the values) and lse_Tq (float32); a row with limit 0 gives 0
    and -inf. Source: FlashAttention's online softmax (arXiv 2205.14135), split by keys.
    """
    if layer.format.packed and not _is_compiling():
        return _attend_packed(q_TqC, layer, blocks_BJ, row_starts_B, limits_T, scale, onto)
    state = torch.ops.longhelix.partial_attention(
        q_TqC, layer.values, layer.scales, blocks_BJ, row_starts_B, limits_T, scale, max_rows, *_format_arguments(layer)
    )
    return state if onto is None else merge_states(*map(torch.stack, zip(onto, state, strict=True)))


_library.define(
    "partial_attention(Tensor q_TqC, Tensor values, Tensor? scales, Tensor blocks_BJ, Tensor row_starts_B, "
    "Tensor limits_T, float scale, SymInt? max_rows, str dtype, int value_size, bool shared_values) -> (Tensor, Tensor)"
)


def _partial_attention(q_TqC, values, scales, blocks_BJ, row_starts_B, limits_T, scale, max_rows, *format):
    layer = _layer(values, scales, q_TqC.shape[-1], *format)
    if layer.format.packed:
        return _attend_packed(q_TqC, layer, blocks_BJ, row_starts_B, limits_T, scale)
    if (planned := flashinfer.attend(q_TqC, values, limits_T)) is not None:
        return planned
    if q_TqC.is_cuda:
        most_rows = max_rows if max_rows is not None else int(row_starts_B.diff().max())
        table = blocks_BJ, row_starts_B, limits_T
        return _triton().partial_attention(q_TqC, values, scales, *table, scale, layer.format.value_size, most_rows)
    return reference.partial_attention(q_TqC, *layer.keys_and_values(), blocks_BJ, row_starts_B, limits_T, scale)


def _attend_packed(q_TqC, layer, blocks_BJ, row_starts_B, limits_T, scale, onto=None):
    rows, num_query_heads, _ = q_TqC.shape
    q_TqC = _dense_rows(q_TqC)
    blocks_BJ = blocks_BJ if blocks_BJ.stride(1) == 1 else blocks_BJ.contiguous()
    row_starts_B, limits_T = _dense(row_starts_B), _dense(limits_T)
    if onto is None:
        out_TqC = q_TqC.new_empty(rows, num_query_heads, layer.format.value_size)
        lse_Tq = q_TqC.new_empty(rows, num_query_heads, dtype=torch.float32)
    else:
        out_TqC, lse_Tq = map(_dense, onto)
    native.module.attend(
        q_TqC.data_ptr(),
        native.NUMBERS[q_TqC.dtype],
        q_TqC.stride(0),
        layer.handle,
        num_query_heads,
        len(blocks_BJ),
        blocks_BJ.data_ptr(),
        blocks_BJ.stride(0),
        blocks_BJ.shape[1],
        row_starts_B.data_ptr(),
        limits_T.data_ptr(),
        scale,
        out_TqC.data_ptr(),
        lse_Tq.data_ptr(),
        onto is not None,
    )
    return out_TqC, lse_Tq


@torch.library.register_fake("longhelix::partial_attention", lib=_library)
def _(q_TqC, values, scales, blocks_BJ, row_starts_B, limits_T, scale, max_rows, dtype, value_size, shared_values):
    shape = q_TqC.shape[:2]
    return q_TqC.new_empty(*shape, value_size), q_TqC.new_empty(shape, dtype=torch.float32)


def merge_states(out_NTQC: Tensor, lse_NTQ: Tensor) -> tuple[Tensor, Tensor]:
    """Merge N partial attentions over disjoint sets of keys into the attention over their union, exactly.

    m = max of lse over N; weights exp(lse - m), summed in rank order in float32 (float64 for float64 input);
    lse = m + log(sum). A shard with LSE -inf has weight 0, whatever its output holds; all empty gives 0 and -inf.
    Any float dtype in, the same out: (out_TQC, lse_TQ). Source: Helix, arXiv 2507.07120, section 2.1.
    """
    return torch.ops.longhelix.merge_states(out_NTQC, lse_NTQ)


_library.define("merge_states(Tensor out_NTQC, Tensor lse_NTQ) -> (Tensor, Tensor)")


def _merge_states(out_NTQC, lse_NTQ):
    if out_NTQC.is_cuda and out_NTQC.dtype != torch.float64:
        return _triton().merge_states(out_NTQC, lse_NTQ)
    return reference.merge_states(out_NTQC, lse_NTQ)


@torch.library.register_fake("longhelix::merge_states", lib=_library)
def _(out_NTQC, lse_NTQ):
    return out_NTQC.new_empty(out_NTQC.shape[1:]), lse_NTQ.new_empty(lse_NTQ.shape[1:])


def write_kv(k_TkC: Tensor, v_TkC: Tensor | None, layer: KVLayer, slots_T: Tensor) -> None:
    """Write the rows that this rank owns into one layer's pool, quantised as the pool's dtype asks.

    slots_T (int64): block id * D + offset in the block, or -1 for a row that another rank owns. v_TkC is None where
    values are the first channels of the keys.
    """
    if layer.format.packed and not _is_compiling():
        return _write_packed(k_TkC, v_TkC, layer, slots_T)
    return torch.ops.longhelix.write_kv(k_TkC, v_TkC, layer.values, layer.scales, slots_T, *_format_arguments(layer))


_library.define(
    "write_kv(Tensor k_TkC, Tensor? v_TkC, Tensor(a!) values, Tensor(b!)? scales, Tensor slots_T, str dtype, "
    "int value_size, bool shared_values) -> ()"
)


def _write_kv(k_TkC, v_TkC, values, scales, slots_T, *format):
    layer = _layer(values, scales, k_TkC.shape[-1], *format)
    if layer.format.packed:
        _write_packed(k_TkC, v_TkC, layer, slots_T)
    elif k_TkC.is_cuda:
        _triton().write_kv(k_TkC, None if layer.format.shared_values else v_TkC, values, scales, slots_T)
    else:
        k_PDkC, v_PDkC = layer.keys_and_values()
        reference.write_kv(k_TkC, None if layer.format.shared_values else v_TkC, k_PDkC, v_PDkC, slots_T)


def _write_packed(k_TkC, v_TkC, layer, slots_T):
    k_TX = _dense_rows(k_TkC)
    v_TX = k_TX if v_TkC is None else _dense_rows(v_TkC)
    slots_T = slots_T.contiguous()
    native.module.write(
        k_TX.data_ptr(),
        k_TX.stride(0),
        v_TX.data_ptr(),
        v_TX.stride(0),
        native.NUMBERS[k_TkC.dtype],
        layer.handle,
        slots_T.data_ptr(),
        len(slots_T),
    )


@torch.library.register_fake("longhelix::write_kv", lib=_library)
def _(k_TkC, v_TkC, values, scales, slots_T, dtype, value_size, shared_values):
    return None


def expand_latents(layer: KVLayer, up_qXZ: Tensor, nope_size: int, blocks_J: Tensor, first: int, count: int) -> KVLayer:
    """Keys and values of q heads, made from the latents of one sequence's tokens [first, first + count).

    layer: a pool of latents, each with the rotated key that all heads share. up_qXZ (any float dtype): of each head
    `nope_size` channels of its key, without rotation, then those of its value. blocks_J (int64): the sequence's local
    KV blocks; `first` lies at the start of one. Returns a layer of one KV block: packed if the pool is (all sizes must
    then be multiples of 16, and whole tiles are made); else in rows, keys and values filled with zeros to one size,
    and in the dtype of up_qXZ where the pool is quantised. Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1).
    """
    if first + count > len(blocks_J) * layer.format.block_tokens:
        held = len(blocks_J) * layer.format.block_tokens
        raise ValueError(
            f"the sequence's KV blocks here have room for {held} tokens, but {first + count} are asked for"
        )
    made = _expanded_format(layer.format, up_qXZ, nope_size, count)
    if made.packed and not _is_compiling():
        return _expand_packed(layer, up_qXZ, blocks_J, first, made)
    arguments = up_qXZ, nope_size, blocks_J, first, count, layer.format.key_size, *_format_arguments(layer)
    return KVLayer(made, torch.ops.longhelix.expand_latents(layer.values, layer.scales, *arguments), None)


_library.define(
    "expand_latents(Tensor values, Tensor? scales, Tensor up_qXZ, int nope_size, Tensor blocks_J, SymInt first, "
    "SymInt count, int key_size, str dtype, int value_size, bool shared_values) -> Tensor"
)


def _expand_latents(values, scales, up_qXZ, nope_size, blocks_J, first, count, key_size, *format):
    layer = _layer(values, scales, key_size, *format)
    made = _expanded_format(layer.format, up_qXZ, nope_size, count)
    if made.packed:
        return _expand_packed(layer, up_qXZ, blocks_J, first, made).values
    used = slice(first // layer.format.block_tokens, -(-(first + count) // layer.format.block_tokens))
    latent_SC = values[blocks_J[used], 0].flatten(0, 2)[:count]
    if scales is not None:
        latent_SC = latent_SC.to(up_qXZ.dtype) * scales[blocks_J[used], 0].flatten()[:count, None]
    k_SqC, v_SqC = reference.expand_latents(latent_SC, up_qXZ, nope_size)
    filled = [pad(part, (0, made.key_size - part.shape[-1])) for part in (k_SqC, v_SqC)]
    return torch.stack(filled).unsqueeze(0).to(made.torch_dtype)


def _expand_packed(layer, up_qXZ, blocks_J, first, made):
    blocks_J, up_XZ = _dense(blocks_J), _dense(up_qXZ.flatten(0, 1))
    expanded = made.new_layer(1, up_qXZ.device)
    native.module.expand(
        up_XZ.data_ptr(),
        native.NUMBERS[up_XZ.dtype],
        up_XZ.stride(0),
        layer.handle,
        blocks_J.data_ptr(),
        first // native.LANES,
        expanded.handle,
    )
    return expanded


def _expanded_format(latents: KVFormat, up_qXZ: Tensor, nope_size: int, count: int) -> KVFormat:
    heads, channels, _ = up_qXZ.shape
    key_size, value_size = nope_size + latents.key_size - latents.value_size, channels - nope_size
    if latents.packed:
        return KVFormat(latents.dtype, -(-count // native.LANES) * native.LANES, heads, key_size, value_size, True)
    dtype = str(up_qXZ.dtype).removeprefix("torch.") if latents.dtype in NARROW else latents.dtype
    size = max(key_size, value_size)
    return KVFormat(dtype, count, heads, size, size, False)


@torch.library.register_fake("longhelix::expand_latents", lib=_library)
def _(values, scales, up_qXZ, nope_size, blocks_J, first, count, key_size, *format):
    layer = _layer(values, scales, key_size, *format)
    return _expanded_format(layer.format, up_qXZ, nope_size, count).new_layer(1, values.device).values


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
    """What lies between the QKV product and attention: q_TqC, rotated; keys, rotated, and values go to the pool.

    qkv_TX: query heads, key heads, value heads. q_norm, k_norm: weights of an RMSNorm of each head. cos_TR, sin_TR:
    float32, R = C/2; channel c is rotated with channel c + C/2 (arXiv 2104.09864). slots_T as in `write_kv`.
    """
    if layer.format.packed and not _is_compiling():
        return _rotate_packed(qkv_TX, q_norm, k_norm, norm_eps, cos_TR, sin_TR, layer, slots_T)
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
        *_format_arguments(layer),
    )


_library.define(
    "rotate_and_write(Tensor qkv_TX, Tensor? q_norm, Tensor? k_norm, float norm_eps, Tensor cos_TR, Tensor sin_TR, "
    "Tensor(a!) values, Tensor(b!)? scales, Tensor slots_T, int num_kv_heads, str dtype, int value_size, "
    "bool shared_values) -> Tensor"
)


def _rotate_and_write(
    qkv_TX, q_norm, k_norm, norm_eps, cos_TR, sin_TR, values, scales, slots_T, num_kv_heads, dtype, value_size, shared
):
    layer = _layer(values, scales, value_size, dtype, value_size, shared)
    if layer.format.packed:
        return _rotate_packed(qkv_TX, q_norm, k_norm, norm_eps, cos_TR, sin_TR, layer, slots_T)
    q_TqC, k_TkC, v_TkC = reference.rotate(qkv_TX, num_kv_heads, value_size, q_norm, k_norm, norm_eps, cos_TR, sin_TR)
    _write_kv(k_TkC, v_TkC, values, scales, slots_T, dtype, value_size, shared)
    return q_TqC


def _rotate_packed(qkv_TX, q_norm, k_norm, norm_eps, cos_TR, sin_TR, layer, slots_T):
    format = layer.format
    num_query_heads = qkv_TX.shape[1] // format.key_size - 2 * format.num_kv_heads
    qkv_TX = _dense_rows(qkv_TX)
    q_norm, k_norm, cos_TR, sin_TR, slots_T = map(_dense, (q_norm, k_norm, cos_TR, sin_TR, slots_T))
    q_TqC = qkv_TX.new_empty(len(qkv_TX), num_query_heads, format.key_size)
    native.module.rotate(
        qkv_TX.data_ptr(),
        qkv_TX.stride(0),
        native.NUMBERS[qkv_TX.dtype],
        0 if q_norm is None else q_norm.data_ptr(),
        0 if k_norm is None else k_norm.data_ptr(),
        norm_eps,
        cos_TR.data_ptr(),
        sin_TR.data_ptr(),
        layer.handle,
        num_query_heads,
        slots_T.data_ptr(),
        len(slots_T),
        q_TqC.data_ptr(),
    )
    return q_TqC


@torch.library.register_fake("longhelix::rotate_and_write", lib=_library)
def _(qkv_TX, q_norm, k_norm, norm_eps, cos, sin, values, scales, slots, num_kv_heads, dtype, value_size, shared):
    return qkv_TX.new_empty(qkv_TX.shape[0], qkv_TX.shape[1] // value_size - 2 * num_kv_heads, value_size)


def linear(
    x_TX: Tensor,
    weight: Weight,
    *,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    norm_eps: float = 0.0,
    swiglu: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """x W^T + bias, with what a decoder has around it: a memory-bound product hides it.

    `norm`: weight of an RMSNorm (arXiv 1910.07467) of x before the product. `swiglu`: the first half of the outputs
    gates the second, silu(gate) * up (arXiv 2002.05202). `residual`: added last. Returns `dtype`, by default that of x.
    """
    dtype = dtype or x_TX.dtype
    if weight.packed and not _is_compiling():
        return _multiply_packed(x_TX, weight, bias, norm, norm_eps, swiglu, residual, dtype)
    return torch.ops.longhelix.linear(
        x_TX, weight.values, bias, norm, norm_eps, swiglu, residual, dtype, *_weight_arguments(weight)
    )


_library.define(
    "linear(Tensor x_TX, Tensor values, Tensor? bias, Tensor? norm, float norm_eps, bool swiglu, Tensor? residual, "
    "ScalarType dtype, str weight_dtype, int outputs, int depth, bool packed) -> Tensor"
)


def _linear(x_TX, values, bias, norm, norm_eps, swiglu, residual, dtype, *weight):
    if weight[-1]:
        packed = Weight(values, *weight)
        return _multiply_packed(x_TX, packed, bias, norm, norm_eps, swiglu, residual, dtype)
    return reference.linear(x_TX, values, bias, norm, norm_eps, swiglu, residual, dtype)


def _multiply_packed(x_TX, weight, bias, norm, norm_eps, swiglu, residual, dtype):
    outputs = weight.outputs // 2 if swiglu else weight.outputs
    x_TX, norm, bias = _dense_rows(x_TX), _dense(norm), _dense(bias)
    if residual is not None:
        residual = _dense_rows(residual if residual.dtype == dtype else residual.to(dtype))
    out_TX = x_TX.new_empty(len(x_TX), outputs, dtype=dtype)
    native.module.linear(
        x_TX.data_ptr(),
        native.NUMBERS[x_TX.dtype],
        x_TX.stride(0),
        len(x_TX),
        0 if norm is None else norm.data_ptr(),
        norm_eps,
        weight.handle,
        0 if bias is None else bias.data_ptr(),
        swiglu,
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0),
        out_TX.data_ptr(),
        native.NUMBERS[dtype],
        outputs,
    )
    return out_TX


@torch.library.register_fake("longhelix::linear", lib=_library)
def _(x_TX, values, bias, norm, norm_eps, swiglu, residual, dtype, weight_dtype, outputs, depth, packed):
    return x_TX.new_empty(x_TX.shape[0], outputs // 2 if swiglu else outputs, dtype=dtype)


def take_rows(x_TX: Tensor, rows_t: Tensor) -> Tensor:
    """Rows `rows_t` (int64) of x_TX, in that order: x_tX."""
    if native.module is not None and not x_TX.is_cuda and not _is_compiling():
        return _copy_rows(x_TX, rows_t)
    return torch.ops.longhelix.take_rows(x_TX, rows_t)


_library.define("take_rows(Tensor x_TX, Tensor rows_t) -> Tensor")


def _take_rows(x_TX, rows_t):
    return x_TX.index_select(0, rows_t)


def _copy_rows(x_TX, rows_t):
    x_TX = _dense_rows(x_TX)
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


@torch.library.register_fake("longhelix::take_rows", lib=_library)
def _(x_TX, rows_t):
    return x_TX.new_empty(rows_t.shape[0], x_TX.shape[1])


_library.impl("take_rows", _take_rows, "CompositeExplicitAutograd")
_library.impl("partial_attention", _partial_attention, "CompositeExplicitAutograd")
_library.impl("merge_states", _merge_states, "CompositeExplicitAutograd")
_library.impl("write_kv", _write_kv, "CompositeExplicitAutograd")
_library.impl("expand_latents", _expand_latents, "CompositeExplicitAutograd")
_library.impl("rotate_and_write", _rotate_and_write, "CompositeExplicitAutograd")
_library.impl("linear", _linear, "CompositeExplicitAutograd")


def _dense_rows(rows: Tensor) -> Tensor:
    """Rows that are each one run of memory, at whatever distance from each other."""
    if rows.stride(-1) == 1 and (rows.dim() == 2 or rows.stride(1) == rows.shape[2]):
        return rows
    return rows.contiguous()


def _dense(values: Tensor | None) -> Tensor | None:
    return values if values is None or values.is_contiguous() else values.contiguous()


def _triton():
    """The GPU kernels; Triton is not imported where there is no GPU."""
    from longhelix.kernels import triton

    return triton


def _format_arguments(layer: KVLayer) -> tuple[str, int, bool]:
    return layer.format.dtype, layer.format.value_size, layer.format.shared_values


def _weight_arguments(weight: Weight) -> tuple[str, int, int, bool]:
    return weight.dtype, weight.outputs, weight.depth, weight.packed


def _layer(values, scales, key_size, dtype, value_size, shared_values) -> KVLayer:
    """The layer that an op was given, put together again from its tensors."""
    packed = values.dtype == torch.uint8
    block_tokens, num_kv_heads = (values.shape[2] * native.LANES, values.shape[0]) if packed else values.shape[2:4]
    return KVLayer(
        KVFormat(dtype, block_tokens, num_kv_heads, key_size, value_size, packed, shared_values), values, scales
    )
