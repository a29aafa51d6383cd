"""The direct form of MLA: attention over keys and values that are computed from cached latents, piece by piece."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from longhelix.compute.kernels import native, reference
from longhelix.compute.kernels.attention import partial_attention
from longhelix.compute.kernels.layer import ROWS, TILES, KVFormat, KVLayer
from longhelix.compute.kernels.library import dense, format_arguments, is_compiling, layer_of, library
from longhelix.compute.kernels.numbers import STORED

PIECE_TOKENS = 2048  # of a sequence, whose keys and values exist at a time; rounded up to whole KV blocks


def can_expand(format: KVFormat, nope_size: int, value_size: int) -> bool:
    """Return whether `expand_latents` supports these head sizes for a pool of `format`."""
    return not (format.arrangement is TILES and (nope_size % native.LANES or value_size % native.LANES))


def direct_attention(
    q_TqC: Tensor,
    layer: KVLayer,
    up_qXZ: Tensor,
    nope_size: int,
    blocks_X: Tensor,
    extents_B2: Tensor,
    row_starts_B: Tensor,
    limits_T: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of packed rows over this rank's latents, as `partial_attention` gives it for expanded keys and values.

    q_TqC: queries with `nope_size` channels without rotation, then the rotated ones. layer, up_qXZ: see
    `expand_latents`. blocks_X, extents_B2, row_starts_B, limits_T, scale: see `partial_attention`. Returns out_TqC
    (dtype of q, channels of the values) and lse_Tq (float32). A sequence's pieces lie at absolute positions, and their
    states are merged in order, in float32. Costs 2 (nope + rope + value) FLOP per row, visible token and head, and
    2 latent (nope + value) per token and head.
    """
    value_size = up_qXZ.shape[1] - nope_size
    out_TqC = q_TqC.new_zeros(*q_TqC.shape[:2], value_size)
    lse_Tq = torch.full(q_TqC.shape[:2], -torch.inf, dtype=torch.float32, device=q_TqC.device)
    block_tokens, starts = layer.format.block_tokens, row_starts_B.tolist()
    piece_tokens = -(-PIECE_TOKENS // block_tokens) * block_tokens
    for (begin, end), start, stop in zip(extents_B2.tolist(), starts[:-1], starts[1:], strict=True):
        rows, blocks_J, state = slice(start, stop), blocks_X[begin:end], None
        own_TqC, own_limits_T = q_TqC[rows].float(), limits_T[rows]
        seen = int(own_limits_T.max()) if stop > start else 0
        for first in range(0, seen, piece_tokens):
            made = expand_latents(layer, up_qXZ, nope_size, blocks_J, first, min(piece_tokens, seen - first))
            state = _attend(own_TqC, made, own_limits_T - first, scale, state)
            del made  # the next one takes the same memory
        if state is not None:
            out_TqC[rows], lse_Tq[rows] = state[0][..., :value_size], state[1]
    return out_TqC, lse_Tq


def _attend(
    q_TqC: Tensor, made: KVLayer, limits_T: Tensor, scale: float, onto: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Attend with one sequence's rows over a layer of one KV block."""
    rows, missing = len(limits_T), made.format.key_size - q_TqC.shape[2]
    blocks_X, extents_12 = limits_T.new_zeros(1), limits_T.new_tensor([[0, 1]])
    table = blocks_X, extents_12, limits_T.new_tensor([0, rows]), limits_T.clamp(0, made.format.block_tokens)
    return partial_attention(pad(q_TqC, (0, missing)), made, *table, scale, rows, onto=onto)


def expand_latents(layer: KVLayer, up_qXZ: Tensor, nope_size: int, blocks_J: Tensor, first: int, count: int) -> KVLayer:
    """Keys and values of q heads, made from the latents of one sequence's tokens [first, first + count).

    layer: a pool of latents, each with the rotated key that all heads share. up_qXZ (any float dtype): of each head
    `nope_size` channels of its key, without rotation, then those of its value. blocks_J (int64): the sequence's local
    KV blocks; `first` lies at the start of one. Returns a layer of one KV block: in tiles if the pool is (all sizes
    must then be multiples of 16, and whole tiles are made); else in rows, keys and values filled with zeros to one
    size, and in the dtype of up_qXZ where the pool is quantised. Source: DeepSeek-V2 (arXiv 2405.04434, section 2.1).
    """
    if first + count > len(blocks_J) * layer.format.block_tokens:
        room_tokens = len(blocks_J) * layer.format.block_tokens
        raise ValueError(
            f"the sequence's KV blocks here have room for {room_tokens} tokens, but {first + count} are requested"
        )
    made = _expanded_format(layer.format, up_qXZ, nope_size, count)
    if made.arrangement is TILES and not is_compiling():
        return _expand_tiles(layer, up_qXZ, blocks_J, first, made)
    arguments = up_qXZ, nope_size, blocks_J, first, count, layer.format.key_size, *format_arguments(layer)
    return KVLayer(made, torch.ops.longhelix.expand_latents(layer.values, layer.scales, *arguments), None)


library.define(
    "expand_latents(Tensor values, Tensor? scales, Tensor up_qXZ, int nope_size, Tensor blocks_J, SymInt first, "
    "SymInt count, int key_size, str arrangement, str dtype, int value_size, bool shared_values, bool rounded) "
    "-> Tensor"
)


def _expand_latents(values, scales, up_qXZ, nope_size, blocks_J, first, count, key_size, *format):
    layer = layer_of(values, scales, key_size, *format)
    made = _expanded_format(layer.format, up_qXZ, nope_size, count)
    if made.arrangement is TILES:
        return _expand_tiles(layer, up_qXZ, blocks_J, first, made).values
    used = slice(first // layer.format.block_tokens, -(-(first + count) // layer.format.block_tokens))
    latent_JDkC, _ = layer.decoded(blocks_J[used])
    k_SqC, v_SqC = reference.expand_latents(latent_JDkC.flatten(0, 2)[:count], up_qXZ, nope_size)
    filled = [pad(made_SqC, (0, made.key_size - made_SqC.shape[-1])) for made_SqC in (k_SqC, v_SqC)]
    return torch.stack(filled).unsqueeze(0).to(STORED[made.dtype].dtype)


def _expand_tiles(layer, up_qXZ, blocks_J, first, made):
    blocks_J, up_XZ = dense(blocks_J), dense(up_qXZ.flatten(0, 1))
    expanded = made.new_layer(1, up_qXZ.device)
    native.module.expand(
        up_XZ.data_ptr(),
        native.NUMBER_BY_DTYPE[up_XZ.dtype],
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
    if latents.arrangement is TILES:
        return KVFormat(
            dtype="bfloat16" if latents.scales.bits else latents.dtype,
            block_tokens=-(-count // native.LANES) * native.LANES,
            num_kv_heads=heads,
            key_size=key_size,
            value_size=value_size,
            arrangement=TILES,
        )
    unscaled = STORED[latents.dtype].largest is None
    dtype = latents.dtype if unscaled else str(up_qXZ.dtype).removeprefix("torch.")
    size = max(key_size, value_size)
    return KVFormat(
        dtype=dtype, block_tokens=count, num_kv_heads=heads, key_size=size, value_size=size, arrangement=ROWS
    )


@torch.library.register_fake("longhelix::expand_latents", lib=library)
def _(values, scales, up_qXZ, nope_size, blocks_J, first, count, key_size, *format):
    layer = layer_of(values, scales, key_size, *format)
    return _expanded_format(layer.format, up_qXZ, nope_size, count).new_layer(1, values.device).values


library.impl("expand_latents", _expand_latents, "CompositeExplicitAutograd")
