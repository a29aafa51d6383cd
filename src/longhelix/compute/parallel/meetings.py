"""Meetings: KVP instances with clocks of their own, and the groups in which they work on requests that they share."""

from dataclasses import dataclass

from torch import Tensor

from longhelix.compute.parallel.collectives import RankGroup
from longhelix.compute.parallel.fabric import Fabric

_KEPT_STEPS = 1000  # by their numbers, after the last one that needed a group


@dataclass(frozen=True)
class Shared:
    """Rows of a batch that several instances have, each with its own part of their KV.

    Attributes:
        group: The ranks that have them, one of each instance.
        rows_S: Where they are among the batch's rows. int64. As many on each instance, in the same order.
    """

    group: RankGroup
    rows_S: Tensor


class Meetings:
    """The groups of a rank with those in its place in other instances.

    A group is made when its instances first share a request, by them alone: all of them come to it in the same step,
    whatever the others do meanwhile. It is dropped, with its memory and file descriptors, once no step has needed it
    for a while, and made again by the next one that does. Its ranks agree on that without a word: each knows the number
    of the last step that needed it, and the number of this one.
    """

    def __init__(self, kvp: RankGroup, fabric: Fabric) -> None:
        """kvp: the group of all instances."""
        self._kvp, self._fabric = kvp, fabric
        self._first = kvp.ranks[0] - fabric.rank % (kvp.ranks[1] - kvp.ranks[0]) if kvp.size > 1 else 0
        self._made: dict[tuple[int, ...], RankGroup] = {}
        self._last_step: dict[tuple[int, ...], int] = {}  # that needed each of them
        self._step_id = 0

    @property
    def groups(self) -> tuple[RankGroup, ...]:
        """Those that were made, in their order."""
        return tuple(self._made.values())

    def begin(self, step_id: int) -> None:
        """A step begins: drop the groups that none has needed for a while."""
        self._step_id = step_id
        for instances in [one for one, last in self._last_step.items() if step_id - last > _KEPT_STEPS]:
            del self._made[instances], self._last_step[instances]

    def of(self, instances: tuple[int, ...]) -> RankGroup:
        """The group of some instances, in ascending order, of which this rank's is one."""
        if len(instances) == self._kvp.size:
            return self._kvp
        if instances not in self._made:
            self._made[instances] = self._fabric.meet(self._groups(instances), self._step_id)
        self._last_step[instances] = self._step_id
        return self._made[instances]

    def _groups(self, instances: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The groups of these instances, one for each place in an instance."""
        places = range(self._kvp.ranks[1] - self._kvp.ranks[0])
        return tuple(tuple(self._first + one * len(places) + place for one in instances) for place in places)
