"""One world of ranks, seen through a layout: the groups that a rank belongs to."""

from dataclasses import dataclass

import torch.distributed as dist

from longhelix.layout import Layout
from longhelix.parallel.collectives import Group


@dataclass(frozen=True)
class Mesh:
    """This rank's place: `stage` are the N ranks of its pipeline stage, `kvp` those it exchanges attention with."""

    layout: Layout
    rank: int
    stage: Group
    kvp: Group

    @classmethod
    def build(cls, layout: Layout, rank: int) -> "Mesh":
        """Make the groups. Every rank of the world calls this, since groups are made by all ranks together."""
        return cls(layout, rank, _own_group(layout.stage_groups(), rank), _own_group(layout.kvp_groups(), rank))


def _own_group(groups: tuple[tuple[int, ...], ...], rank: int) -> Group:
    handles = {ranks: dist.new_group(ranks) if len(ranks) > 1 else None for ranks in groups}
    ranks = next(ranks for ranks in groups if rank in ranks)
    return Group(ranks, rank, handles[ranks])
