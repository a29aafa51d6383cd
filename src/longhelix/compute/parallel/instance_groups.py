"""Groups of KVP instances with their own clocks that work on the same requests."""

from dataclasses import dataclass

from torch import Tensor

from longhelix.compute.parallel.collectives import RankGroup
from longhelix.compute.parallel.fabric import Fabric

# A group is dropped after this many steps in which it was not used.
_KEPT_STEPS = 1000


@dataclass(frozen=True)
class SharedRows:
    """Rows of a batch that several instances compute, each with its own part of their KV.

    Attributes:
        group: The ranks that compute the rows, one per instance.
        rows_S: Indices of the rows in the batch. int64. Equally many on each instance, in the same order.
    """

    group: RankGroup
    rows_S: Tensor


class InstanceGroups:
    """The groups of a rank with the ranks at the same place in other instances.

    A group is created in the first step in which its instances share a request. Only these instances take part: they
    all run this step, regardless of what other instances do. The group is dropped, with its memory and file
    descriptors, if no step uses it for a while. If a later step needs it, it is created again. The ranks agree on this
    without communication, because each knows the ids of this step and of the last step that used the group.
    """

    def __init__(self, kvp: RankGroup, fabric: Fabric) -> None:
        """kvp: the group of all instances."""
        self._kvp, self._fabric = kvp, fabric
        self._first = kvp.ranks[0] - fabric.rank % (kvp.ranks[1] - kvp.ranks[0]) if kvp.size > 1 else 0
        self._groups: dict[tuple[int, ...], RankGroup] = {}
        self._last_step: dict[tuple[int, ...], int] = {}  # that used each group
        self._step_id = 0

    @property
    def groups(self) -> tuple[RankGroup, ...]:
        """The existing groups, in the order in which they were created."""
        return tuple(self._groups.values())

    def begin(self, step_id: int) -> None:
        """Begin a step: drop the groups that no step has used for a while."""
        self._step_id = step_id
        for instances in [unused for unused, last in self._last_step.items() if step_id - last > _KEPT_STEPS]:
            del self._groups[instances], self._last_step[instances]

    def of(self, instances: tuple[int, ...]) -> RankGroup:
        """Return the group of some instances, in ascending order. This rank's instance is one of them."""
        if len(instances) == self._kvp.size:
            return self._kvp
        if instances not in self._groups:
            self._groups[instances] = self._fabric.group_in_step(self._ranks(instances), self._step_id)
        self._last_step[instances] = self._step_id
        return self._groups[instances]

    def _ranks(self, instances: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the ranks of the groups of these instances, one group for each place in an instance."""
        places = range(self._kvp.ranks[1] - self._kvp.ranks[0])
        return tuple(tuple(self._first + instance * len(places) + place for instance in instances) for place in places)
