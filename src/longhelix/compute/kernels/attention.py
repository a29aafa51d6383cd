"""Partial attention, and the merge of its states. LSEs are natural logarithms in float32."""

import torch
from torch import Tensor

from longhelix.compute.kernels import flashinfer, native, reference
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
from longhelix.compute.kernels.numbers import rotated_channels


def partial_attention(
    q_TqC: Tensor,
    layer: KVLayer,
    blocks_X: Tensor,
    extents_B2: Tensor,
    row_starts_B: Tensor,
    limits_T: Tensor,
    scale: float,
    max_rows: int | None = None,
    most_tokens: int | None = None,
    firsts_T: Tensor | None = None,
    onto: tuple[Tensor, Tensor] | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention of packed rows over this rank's shard of their KV, and the log-sum-exp that merges need.

    A row sees the local tokens from its first one up to its limit. Blocks that end before the first token of all rows
    of a sequence are not read.

    Args:
        q_TqC: Rows of B sequences, one after the other.
        layer: KV of the layer.
        blocks_X: Local KV blocks of all sequences, each in position order. int64.
        extents_B2: Begin and end of each sequence's blocks in blocks_X. int64.
        row_starts_B: First row of each sequence, then T, (B + 1). int64.
        limits_T: Local token after the last one that each row sees. int64.
        scale: Factor of scores.
        max_rows: Maximum rows of a sequence, for launches of a GPU. None: read it back from the GPU.
        most_tokens: Maximum of limits_T. None: as for max_rows.
        firsts_T: First local token that each row sees. int64. None: token 0.
        onto: Result of this op for the same rows and other keys, which is merged in. May be overwritten.
        cap: Scores become cap * tanh(score / cap). None: they stay as they are.

    Returns:
        out_TqC (dtype of q, channels of the values) and lse_Tq (float32). Rows that see no token have 0 and -inf.

    Source: FlashAttention's online softmax (arXiv 2205.14135), split by keys.
    """
    if layer.format.arrangement is TILES and not is_compiling():
        return _attend_tiles(q_TqC, layer, blocks_X, extents_B2, row_starts_B, limits_T, scale, firsts_T, cap, onto)
    table, launch_sizes = (blocks_X, extents_B2, row_starts_B, limits_T), (max_rows, most_tokens)
    state = torch.ops.longhelix.partial_attention(
        q_TqC, layer.values, layer.scales, *table, scale, *launch_sizes, firsts_T, cap, *format_arguments(layer)
    )
    return state if onto is None else merge_states(*map(torch.stack, zip(onto, state, strict=True)))


library.define(
    "partial_attention(Tensor q_TqC, Tensor values, Tensor? scales, Tensor blocks_X, Tensor extents_B2, "
    "Tensor row_starts_B, Tensor limits_T, float scale, SymInt? max_rows, SymInt? most_tokens, Tensor? firsts_T, "
    "float? cap, str arrangement, str dtype, int value_size, bool shared_values, bool rounded) -> (Tensor, Tensor)"
)


def _partial_attention(
    q_TqC,
    values,
    scales,
    blocks_X,
    extents_B2,
    row_starts_B,
    limits_T,
    scale,
    max_rows,
    most_tokens,
    firsts_T,
    cap,
    *format,
):
    layer = layer_of(values, scales, q_TqC.shape[-1], *format)
    table = blocks_X, extents_B2, row_starts_B, limits_T
    if layer.format.arrangement is TILES:
        return _attend_tiles(q_TqC, layer, *table, scale, firsts_T, cap)
    if firsts_T is None and (planned := flashinfer.attend(q_TqC, values, limits_T)) is not None:
        return planned
    dtype, q_TqC = q_TqC.dtype, rotated_channels(q_TqC) if layer.format.rotates_keys else q_TqC
    if q_TqC.is_cuda and layer.format.dtype in triton_kernels().FORMATS:
        most_rows = max_rows if max_rows is not None else int(row_starts_B.diff().max())
        seen_tokens = most_tokens if most_tokens is not None else int(limits_T.amax()) if len(limits_T) else 0
        return triton_kernels().partial_attention(
            q_TqC.to(dtype),
            values,
            scales,
            *table,
            scale,
            layer.format.value_size,
            most_rows,
            seen_tokens,
            firsts_T,
            cap,
        )
    if scales is None:
        return reference.partial_attention(q_TqC, *layer.keys_and_values(), *table, scale, firsts_T, cap)
    k_JDkC, v_JDkC, *table_J = _decoded(layer, blocks_X, extents_B2)
    rows = row_starts_B, limits_T, scale, firsts_T, cap
    out_TqC, lse_Tq = reference.partial_attention(q_TqC, k_JDkC, v_JDkC, *table_J, *rows)
    return out_TqC.to(dtype), lse_Tq


def _decoded(layer: KVLayer, blocks_X: Tensor, extents_B2: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return k_JDkC and v_JDkC of all KV blocks, one sequence after the other, and a block table for them."""
    ids_J = torch.cat([blocks_X[:0], *(blocks_X[begin:end] for begin, end in extents_B2.tolist())])
    counts_B = extents_B2[:, 1] - extents_B2[:, 0]
    ends_B = counts_B.cumsum(0)
    extents_B2 = torch.stack((ends_B - counts_B, ends_B), dim=1)
    return *layer.decoded(ids_J), torch.arange(len(ids_J), device=ids_J.device), extents_B2


def _attend_tiles(q_TqC, layer, blocks_X, extents_B2, row_starts_B, limits_T, scale, firsts_T, cap, onto=None):
    rows, num_query_heads, _ = q_TqC.shape
    firsts_T = None if firsts_T is None else dense(firsts_T)
    q_TqC = dense_rows(q_TqC)
    blocks_X, extents_B2, row_starts_B, limits_T = map(dense, (blocks_X, extents_B2, row_starts_B, limits_T))
    if onto is None:
        out_TqC = q_TqC.new_empty(rows, num_query_heads, layer.format.value_size)
        lse_Tq = q_TqC.new_empty(rows, num_query_heads, dtype=torch.float32)
    else:
        out_TqC, lse_Tq = map(dense, onto)
    native.module.attend(
        q_TqC.data_ptr(),
        native.NUMBER_BY_DTYPE[q_TqC.dtype],
        q_TqC.stride(0),
        layer.handle,
        num_query_heads,
        len(extents_B2),
        blocks_X.data_ptr(),
        extents_B2.data_ptr(),
        row_starts_B.data_ptr(),
        0 if firsts_T is None else firsts_T.data_ptr(),
        limits_T.data_ptr(),
        scale,
        0.0 if cap is None else cap,
        out_TqC.data_ptr(),
        lse_Tq.data_ptr(),
        onto is not None,
    )
    return out_TqC, lse_Tq


@torch.library.register_fake("longhelix::partial_attention", lib=library)
def _(q_TqC, values, scales, *arguments):
    shape, value_size = q_TqC.shape[:2], arguments[-3]
    return q_TqC.new_empty(*shape, value_size), q_TqC.new_empty(shape, dtype=torch.float32)


def merge_states(out_NTQC: Tensor, lse_NTQ: Tensor) -> tuple[Tensor, Tensor]:
    """Merge N partial attentions over disjoint sets of keys into the attention over their union, exactly.

    m = max of lse over N; weights exp(lse - m), summed in rank order in float32 (float64 for float64 input);
    lse = m + log(sum). A shard with LSE -inf has weight 0, whatever its output holds; all empty gives 0 and -inf.
    Any float dtype in, the same out: (out_TQC, lse_TQ). Source: Helix, arXiv 2507.07120, section 2.1.
    """
    return torch.ops.longhelix.merge_states(out_NTQC, lse_NTQ)


library.define("merge_states(Tensor out_NTQC, Tensor lse_NTQ) -> (Tensor, Tensor)")


def _merge_states(out_NTQC, lse_NTQ):
    if out_NTQC.is_cuda and out_NTQC.dtype != torch.float64:
        return triton_kernels().merge_states(out_NTQC, lse_NTQ)
    return reference.merge_states(out_NTQC, lse_NTQ)


@torch.library.register_fake("longhelix::merge_states", lib=library)
def _(out_NTQC, lse_NTQ):
    return out_NTQC.new_empty(out_NTQC.shape[1:]), lse_NTQ.new_empty(lse_NTQ.shape[1:])


library.impl("partial_attention", _partial_attention, "CompositeExplicitAutograd")
library.impl("merge_states", _merge_states, "CompositeExplicitAutograd")
