"""The world of ranks as one rank sees it through a layout: the groups that it belongs to."""

import hashlib
import os
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist

from longhelix.compute.kernels import native
from longhelix.compute.parallel.collectives import RankGroup, group_of
from longhelix.compute.parallel.meetings import Meetings
from longhelix.compute.parallel.pipeline import Pipeline
from longhelix.compute.parallel.traffic import Traffic
from longhelix.spans import UNTRACED, Spans
from longhelix.spec.layout import Layout


@dataclass(frozen=True)
class Mesh:
    """The place of this rank. `stage`: the N ranks of its pipeline stage. `kvp`: the ranks that it exchanges attention
    with. `ffn`: the ranks that share a copy of the FFN and of the vocabulary. `pipeline`: its peers in other stages, if
    there are any. `meetings`: of KVP instances with clocks of their own, those that share requests."""

    layout: Layout
    rank: int
    stage: RankGroup
    kvp: RankGroup
    ffn: RankGroup
    pipeline: Pipeline | None = None
    meetings: Meetings | None = None

    @classmethod
    def build(cls, layout: Layout, rank: int, backend: str | None = None, spans: Spans = UNTRACED) -> "Mesh":
        """Make the groups. All ranks of the world call this, because groups are made by all ranks together.

        `backend`: by default shared memory where all ranks are on one host without a GPU, else that of the world's own
        group. `spans` are told of the groups' collectives.
        """
        if backend is None and layout.world_size > 1 and _share_memory():
            backend = "shm"
        if backend == "shm":
            from longhelix.compute.parallel import shared_memory  # needs the native module

            shared_memory.register()
        stage = _own_group(layout.stage_groups(), rank, backend, spans)
        kvp = _own_group(layout.kvp_groups(), rank, backend, spans)
        # Where there is one copy, its ranks are the stage's.
        ffn = stage if layout.ffn_replicas == 1 else _own_group(layout.ffn_groups(), rank, backend, spans)
        pipeline = Pipeline.build(layout, rank, spans) if layout.pp > 1 else None
        meetings = Meetings(kvp, rank, backend, spans) if layout.ffn_replicas > 1 else None
        return cls(layout, rank, stage, kvp, ffn, pipeline, meetings)

    @property
    def groups(self) -> tuple[RankGroup, ...]:
        """All groups so far, each once, in the order in which they were made."""
        first = (self.stage, self.kvp) if self.ffn is self.stage else (self.stage, self.kvp, self.ffn)
        return first + self._met

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that this rank has given to the transport for other KVP ranks."""
        return self.kvp.exchanged_bytes + sum(group.exchanged_bytes for group in self._met)

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for what was started to be exchanged."""
        return self.kvp.waited_s + sum(group.waited_s for group in self._met)

    @property
    def _met(self) -> tuple[RankGroup, ...]:
        return () if self.meetings is None else self.meetings.groups

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """The traffic of each group so far."""
        return tuple(group.traffic for group in self.groups)

    def fingerprint(self, since: tuple[Traffic, ...]) -> int:
        """The fingerprint of the collectives after `since`: the same number on all ranks that take the same steps."""
        groups = zip_longest(self.traffic, since, fillvalue=Traffic())
        new = [now.since(before) for now, before in groups if now is not before]
        return reduce(Traffic.then, new).fingerprint if new else 0

    def progress(self) -> tuple[int, str]:
        """How many collectives this rank has begun, and the one that it is in, in words, or "". Any thread may ask."""
        begun, current = zip(*(group.progress() for group in self.groups), strict=True)
        return sum(begun), next(filter(None, current), "")


def _own_group(groups: tuple[tuple[int, ...], ...], rank: int, backend: str | None, spans: Spans) -> RankGroup:
    handles = {ranks: dist.new_group(ranks, backend=backend) if len(ranks) > 1 else None for ranks in groups}
    ranks = next(ranks for ranks in groups if rank in ranks)
    return group_of(ranks, rank, handles[ranks], backend, spans)


def _share_memory() -> bool:
    """Whether all ranks of a gloo world can open each other's memory; the same answer on all of them."""
    if dist.get_backend() != "gloo":
        return False
    # Ranks see each other's processes if they share a kernel's boot, its table of processes, and a user.
    kernel, processes = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if not (native.module and kernel.exists() and processes.exists()):
        place = os.urandom(16)  # equal to no other rank's
    else:
        place = f"{kernel.read_text()} {os.readlink(processes)} {os.getuid()}".encode()
    own = torch.frombuffer(bytearray(hashlib.sha256(place).digest()), dtype=torch.uint8)
    places = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(places, own)
    return all(torch.equal(own, other) for other in places)
