"""Attention and its exchange. HOP-B: a part of the batch attends while the part before is exchanged (Helix, arXiv
2507.07120, section 2.1.3)."""

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
    view: int | None = None,
    spans: Spans = UNTRACED,
) -> Tensor:
    """Merged attention of this rank's slice of query heads, out_TnC.

    If the batch has several parts, their exchanges run one after the other while later parts attend. attend:
    `partial_attention`, or another function of the same arguments that gives other channels to exchange. view: what
    rows see, see `Batch.views`.
    """
    firsts_t = batch.firsts_of(view)
    if batch.parts == 1:
        table = batch.blocks_of(view), batch.extents_b2, batch.row_starts_b, batch.limits_t
        span = spans.begin("attention", part=0)
        out_tqC, lse_tq = attend(q_tqC, layer, *table, scale, batch.max_rows, batch.most_tokens, firsts_t)
        spans.end(span)
        return exchange(out_tqC, lse_tq, group, heads_per_rank, batch.holders)
    under_way = []
    for index, part in enumerate(batch.cut()):
        table = batch.blocks_of(view), part.extents_b2, part.row_starts_b, part.limits_t
        span = spans.begin("attention", part=index)
        firsts = None if firsts_t is None else firsts_t[part.rows]
        out_tqC, lse_tq = attend(q_tqC[part.rows], layer, *table, scale, part.max_rows, batch.most_tokens, firsts)
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
    view: int | None = None,
    spans: Spans = UNTRACED,
) -> Tensor:
    """Attention of all query heads of a KVP instance with a clock of its own, out_TqC. Rows that other instances have
    as well are merged with theirs, each head by one of them, and gathered.

    heads_among: returns how many heads each of some instances merges.
    """
    span = spans.begin("attention", part=0)
    table = batch.blocks_of(view), batch.extents_b2, batch.row_starts_b, batch.limits_t
    firsts_T = batch.firsts_of(view)
    out_TqC, lse_Tq = attend(q_TqC, layer, *table, scale, batch.max_rows, batch.most_tokens, firsts_T)
    spans.end(span)
    for rows in batch.shared:
        heads_per_rank = heads_among(rows.group.size)
        merged_SnC = exchange(out_TqC[rows.rows_S], lse_Tq[rows.rows_S], rows.group, heads_per_rank)
        out_TqC[rows.rows_S] = gather_heads(merged_SnC, rows.group, heads_per_rank)
    return out_TqC
