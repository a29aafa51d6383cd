"""Attention and its exchange. In HOP-B, one part of the batch attends while the previous part is exchanged (Helix,
arXiv 2507.07120, section 2.1.3)."""

from collections.abc import Callable

import torch
from torch import Tensor

from longhelix.compute.kernels import KVLayer
from longhelix.compute.models.batch import Batch
from longhelix.compute.parallel.collectives import RankGroup
from longhelix.compute.parallel.exchange import exchange, gather_heads, start_exchange
from longhelix.spans import UNTRACED, Spans


def attend_and_exchange(
    q_tqC: Tensor,
    layer: KVLayer,
    batch: Batch,
    scale: float,
    group: RankGroup,
    heads_per_rank: list[int],
    attend: Callable[..., tuple[Tensor, Tensor]],
    kv_group: int = 0,
    spans: Spans = UNTRACED,
) -> Tensor:
    """Attend, and exchange partial outputs. Returns merged attention of this rank's slice of query heads, out_TnC.

    If the batch has several parts, their exchanges run one after the other while later parts attend.

    Args:
        attend: `partial_attention`, or a function with the same arguments that returns other channels.
        kv_group: KV group of the layer.
    """
    rows, view, most_tokens = batch.attention, batch.attention.views[kv_group], batch.shape.most_tokens
    if batch.shape.parts == 1:
        table = view.blocks_X, rows.extents_b2, rows.row_starts_b, rows.limits_t
        span = spans.begin("attention", part=0)
        out_tqC, lse_tq = attend(q_tqC, layer, *table, scale, rows.max_rows, most_tokens, view.firsts_t)
        spans.end(span)
        return exchange(out_tqC, lse_tq, group, heads_per_rank, batch.sharding.holders)
    under_way = []
    for index, part in enumerate(batch.cut()):
        table = view.blocks_X, part.extents_b2, part.row_starts_b, part.limits_t
        span = spans.begin("attention", part=index)
        firsts_t = None if view.firsts_t is None else view.firsts_t[part.rows]
        out_tqC, lse_tq = attend(q_tqC[part.rows], layer, *table, scale, part.max_rows, most_tokens, firsts_t)
        spans.end(span)
        under_way.append(start_exchange(out_tqC, lse_tq, group, heads_per_rank, part.holders))
    return torch.cat([result() for result in under_way])


def attend_and_share(
    q_TqC: Tensor,
    layer: KVLayer,
    batch: Batch,
    scale: float,
    heads_among: Callable[[int], list[int]],
    attend: Callable[..., tuple[Tensor, Tensor]],
    kv_group: int = 0,
    spans: Spans = UNTRACED,
) -> Tensor:
    """Attend on a KVP instance with its own clock. Returns attention of all query heads, out_TqC.

    For rows that several instances share, each instance merges the partial outputs of some heads, and gathers the
    others.

    Args:
        heads_among: Returns how many heads each of a number of instances merges.
    """
    rows, view = batch.attention, batch.attention.views[kv_group]
    span = spans.begin("attention", part=0)
    table = view.blocks_X, rows.extents_b2, rows.row_starts_b, rows.limits_t
    out_TqC, lse_Tq = attend(q_TqC, layer, *table, scale, rows.max_rows, batch.shape.most_tokens, view.firsts_t)
    spans.end(span)
    for shared in batch.sharding.shared:
        heads_per_rank = heads_among(shared.group.size)
        merged_SnC = exchange(out_TqC[shared.rows_S], lse_Tq[shared.rows_S], shared.group, heads_per_rank)
        out_TqC[shared.rows_S] = gather_heads(merged_SnC, shared.group, heads_per_rank)
    return out_TqC
