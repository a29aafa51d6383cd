"""Meetings: KVP instances with clocks of their own, and the groups in which they work on requests that they share."""

from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store, default_pg_timeout  # no public way to the store

from longhelix.parallel.collectives import RankGroup, group_of
from longhelix.spans import UNTRACED, Spans


@dataclass(frozen=True)
class Shared:
    """Rows of a batch that several instances have, each with its own part of their KV. rows_S: where they are among the
    batch's rows, int64; as many on each of the instances, in the same order. heads_per_rank: how the q local query
    heads fall to the ranks of `group`."""

    group: RankGroup
    rows_S: Tensor
    heads_per_rank: list[int]


class Meetings:
    """The groups of a rank with those in its place in other instances.

    A group is made when its instances first share a request, by them alone: all of them come to it in the same step,
    whatever the others do meanwhile.
    """

    def __init__(self, kvp: RankGroup, rank: int, backend: str | None, spans: Spans = UNTRACED) -> None:
        """kvp: the group of all instances."""
        self._kvp, self._rank, self._backend, self._spans = kvp, rank, backend, spans
        self._made: dict[tuple[int, ...], RankGroup] = {}

    @property
    def groups(self) -> tuple[RankGroup, ...]:
        """Those that were made, in their order."""
        return tuple(self._made.values())

    def of(self, instances: tuple[int, ...]) -> RankGroup:
        """The group of some instances, in ascending order, of which this rank's is one."""
        if len(instances) == self._kvp.size:
            return self._kvp
        if instances not in self._made:
            ranks = tuple(self._kvp.ranks[one] for one in instances)
            handle = _meet(ranks, self._rank, self._backend)
            self._made[instances] = group_of(ranks, self._rank, handle, self._backend, self._spans)
        return self._made[instances]


def _meet(ranks: tuple[int, ...], rank: int, backend: str | None) -> dist.Backend | dist.ProcessGroup:
    """What carries a group's collectives. Its ranks alone call this: torch's own `new_group` wants all ranks of the
    world, and where it does not, names a group by how many the caller has, which here is not the same on all."""
    store = dist.PrefixStore("-".join(map(str, ranks)), _get_default_store())
    index, size = ranks.index(rank), len(ranks)
    match backend or dist.get_backend():
        case "shm":
            from longhelix.parallel.shared_memory import SharedMemoryProcessGroup  # needs the native module

            return SharedMemoryProcessGroup(store, index, size, default_pg_timeout)
        case "gloo":
            return dist.ProcessGroupGloo(store, index, size, default_pg_timeout)
        case "nccl":
            return dist.ProcessGroupNCCL(store, index, size, dist.ProcessGroupNCCL.Options())
        case other:
            raise AssertionError(other)
