"""HOP-B: a part of the batch attends while the part before is exchanged (Helix, arXiv 2507.07120, section 2.1.3)."""

from collections.abc import Callable

import torch
from torch import Tensor

from longhelix.kernels import KVLayer, partial_attention
from longhelix.models.batch import Batch
from longhelix.parallel.collectives import Group
from longhelix.parallel.exchange import exchange, start_exchange


def attend_and_exchange(
    q_TqC: Tensor,
    layer: KVLayer,
    batch: Batch,
    scale: float,
    group: Group,
    heads_per_rank: list[int],
    finish: Callable[[Tensor], Tensor] = lambda out_TqC: out_TqC,
    attend: Callable[..., tuple[Tensor, Tensor]] = partial_attention,
) -> Tensor:
    """Merged attention of this rank's slice of query heads, out_TnC.

    `finish` is applied to partial outputs before they are exchanged. In more than one of the batch's parts where
    `group` overlaps: their exchanges run one after the other, while later parts attend. attend: `partial_attention`.
    """
    if torch.compiler.is_compiling() or batch.parts == 1 or not group.overlaps:
        out_TqC, lse_Tq = attend(
            q_TqC, layer, batch.blocks_BJ, batch.row_starts_B, batch.limits_T, scale, batch.max_rows
        )
        return exchange(finish(out_TqC), lse_Tq, group, heads_per_rank)
    under_way = []
    for part in batch.cut(batch.parts):
        out_TqC, lse_Tq = attend(
            q_TqC[part.rows], layer, part.blocks_BJ, part.row_starts_B, part.limits_T, scale, part.max_rows
        )
        under_way.append(start_exchange(finish(out_TqC), lse_Tq, group, heads_per_rank))
    return torch.cat([result() for result in under_way])
