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
    parts: int,
    attend: Callable[..., tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """Merged attention of this rank's slice of query heads, out_TnC.

    In more than one of `parts` where `group` overlaps and the batch can be cut: the parts' exchanges run one after the
    other, while later parts attend. attend: in place of `partial_attention`, with the channels that are exchanged.
    """
    attend = attend or partial_attention
    if parts == 1 or not group.overlaps or torch.compiler.is_compiling():
        out_TqC, lse_Tq = attend(
            q_TqC, layer, batch.blocks_BJ, batch.row_starts_B, batch.limits_T, scale, batch.max_rows
        )
        return exchange(out_TqC, lse_Tq, group, heads_per_rank)
    under_way = []
    for part in batch.cut(parts):
        out_TqC, lse_Tq = attend(
            q_TqC[part.rows], layer, part.blocks_BJ, part.row_starts_B, part.limits_T, scale, part.max_rows
        )
        under_way.append(start_exchange(out_TqC, lse_Tq, group, heads_per_rank))
    return torch.cat([result() for result in under_way])
