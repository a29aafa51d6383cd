"""MLA's direct form: attention over keys and values that are made from the cached latents, piece by piece."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from longhelix.kernels import native
from longhelix.kernels.layer import KVFormat, KVLayer
from longhelix.kernels.ops import expand_latents, partial_attention

PIECE_TOKENS = 2048  # of a sequence, whose keys and values exist at a time; rounded up to whole KV blocks


def can_expand(format: KVFormat, nope_size: int, value_size: int) -> bool:
    """Whether `expand_latents` makes heads of these sizes from a pool of `format`."""
    return not (format.packed and (nope_size % native.LANES or value_size % native.LANES))


def direct_attention(
    q_TqC: Tensor,
    layer: KVLayer,
    up_qXZ: Tensor,
    nope_size: int,
    blocks_BJ: Tensor,
    row_starts_B: Tensor,
    limits_T: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of packed rows over this rank's latents, as `partial_attention` gives it for expanded keys and values.

    q_TqC: queries with `nope_size` channels without rotation, then the rotated ones. layer, up_qXZ: see
    `expand_latents`. blocks_BJ, row_starts_B, limits_T, scale: see `partial_attention`. Returns out_TqC (dtype of q,
    channels of the values) and lse_Tq (float32). A sequence's pieces lie at absolute positions, and their states are
    merged in order, in float32. Costs 2 (nope + rope + value) FLOP per row, visible token and head, and
    2 latent (nope + value) per token and head.
    """
    value_size = up_qXZ.shape[1] - nope_size
    out_TqC = q_TqC.new_zeros(*q_TqC.shape[:2], value_size)
    lse_Tq = torch.full(q_TqC.shape[:2], -torch.inf, dtype=torch.float32, device=q_TqC.device)
    block_tokens, starts = layer.format.block_tokens, row_starts_B.tolist()
    piece_tokens = -(-PIECE_TOKENS // block_tokens) * block_tokens
    for blocks_J, start, stop in zip(blocks_BJ, starts[:-1], starts[1:], strict=True):
        rows, state = slice(start, stop), None
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
    """One sequence's rows over a layer of one KV block."""
    rows, missing = len(limits_T), made.format.key_size - q_TqC.shape[2]
    table = limits_T.new_zeros(1, 1), limits_T.new_tensor([0, rows]), limits_T.clamp(0, made.format.block_tokens)
    return partial_attention(pad(q_TqC, (0, missing)), made, *table, scale, rows, onto)
