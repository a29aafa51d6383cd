"""The groups of ranks to which one rank belongs."""

from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest

from longhelix.compute.parallel.collectives import RankGroup
from longhelix.compute.parallel.fabric import Fabric
from longhelix.compute.parallel.instance_groups import InstanceGroups
from longhelix.compute.parallel.pipeline import Pipeline
from longhelix.compute.parallel.traffic import Traffic
from longhelix.spans import UNTRACED, Spans
from longhelix.spec.hosts import Hosts
from longhelix.spec.layout import Layout


@dataclass(frozen=True)
class Mesh:
    """The place of this rank in the world.

    Attributes:
        layout: How the ranks share the work.
        rank: This rank.
        stage: The N ranks of its pipeline stage.
        kvp: The ranks with which it exchanges attention.
        ffn: The ranks that share a copy of the FFN and of the vocabulary.
        pipeline: Its peers in other stages. None if there is one stage.
        instance_groups: Groups of KVP instances that share requests. None if all instances have one clock.
    """

    layout: Layout
    rank: int
    stage: RankGroup
    kvp: RankGroup
    ffn: RankGroup
    pipeline: Pipeline | None = None
    instance_groups: InstanceGroups | None = None

    @classmethod
    def build(
        cls,
        layout: Layout,
        rank: int,
        backend: str | None = None,
        spans: Spans = UNTRACED,
        hosts: Hosts | None = None,
    ) -> "Mesh":
        """Make the groups. All ranks of the world call this, because groups are made by all ranks together.

        Args:
            backend: None: shared memory if all ranks of a host can share it, else the backend of the world.
            spans: Records the collectives of the groups.
            hosts: Which host runs each rank. None if one host runs all of them.
        """
        fabric = Fabric.of(rank, hosts or Hosts.in_order([layout.world_size]), backend, spans)
        stage = fabric.group_among(layout.stage_groups())
        kvp = fabric.group_among(layout.kvp_groups())
        # If there is one copy, its ranks are those of the stage.
        ffn = stage if layout.ffn_replicas == 1 else fabric.group_among(layout.ffn_groups())
        return cls(
            layout=layout,
            rank=rank,
            stage=stage,
            kvp=kvp,
            ffn=ffn,
            pipeline=Pipeline.build(layout, rank, fabric.hosts, spans) if layout.pp > 1 else None,
            instance_groups=InstanceGroups(kvp, fabric) if layout.ffn_replicas > 1 else None,
        )

    @property
    def groups(self) -> tuple[RankGroup, ...]:
        """All groups so far, each once, in the order in which they were made."""
        first = (self.stage, self.kvp) if self.ffn is self.stage else (self.stage, self.kvp, self.ffn)
        return first + self._instance_groups

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that this rank has sent to other KVP ranks."""
        return self.kvp.exchanged_bytes + sum(group.exchanged_bytes for group in self._instance_groups)

    @property
    def network_bytes(self) -> int:
        """Bytes that this rank has sent to ranks of other hosts. CPU ranks only."""
        between = 0 if self.pipeline is None else self.pipeline.network_bytes
        return between + sum(group.network_bytes for group in self.groups)

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for started exchanges."""
        return self.kvp.waited_s + sum(group.waited_s for group in self._instance_groups)

    @property
    def _instance_groups(self) -> tuple[RankGroup, ...]:
        return () if self.instance_groups is None else self.instance_groups.groups

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """The traffic of each group so far."""
        return tuple(group.traffic for group in self.groups)

    def fingerprint(self, since: tuple[Traffic, ...]) -> int:
        """Return the fingerprint of the collectives after `since`: the same on all ranks that run the same steps."""
        groups = zip_longest(self.traffic, since, fillvalue=Traffic())
        new = [now.since(before) for now, before in groups if now is not before]
        return reduce(Traffic.then, new).fingerprint if new else 0

    def progress(self) -> tuple[int, str]:
        """Return the number of collectives so far, and the running one in words or "". Any thread may call this."""
        counts, current = zip(*(group.progress() for group in self.groups), strict=True)
        return sum(counts), next(filter(None, current), "")
