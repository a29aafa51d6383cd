"""Makes groups of ranks, over shared memory, gloo or NCCL."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, default_pg_timeout  # no public way to the store

from longhelix.compute.kernels import native
from longhelix.compute.parallel.collectives import RankGroup, group_of
from longhelix.spans import UNTRACED, Spans
from longhelix.spec.hosts import Hosts


@dataclass(frozen=True)
class Fabric:
    """The connections of one rank to the others.

    Attributes:
        rank: This rank.
        hosts: Which host runs each rank.
        backend: Backend of groups whose ranks are on one host: "shm", "gloo" or "nccl".
        spans: Records the collectives of all groups.
    """

    rank: int
    hosts: Hosts
    backend: str | None
    spans: Spans = UNTRACED

    @classmethod
    def of(cls, rank: int, hosts: Hosts, backend: str | None = None, spans: Spans = UNTRACED) -> "Fabric":
        """Choose a backend, together with all ranks of the world.

        Args:
            backend: None: shared memory if the ranks of every host can share it, else the backend of the world.
        """
        if backend is None and hosts.world_size > 1:
            backend = "shm" if _share_memory(hosts) else dist.get_backend()
        if backend == "shm":
            from longhelix.compute.parallel import across_hosts, shared_memory  # need the native module

            shared_memory.register()
            across_hosts.register()
        return cls(rank, hosts, backend, spans)

    def group_among(self, groups: tuple[tuple[int, ...], ...]) -> RankGroup:
        """Make groups, together with all ranks of the world. Returns the group that this rank belongs to.

        If one of the groups goes across hosts, all of them use its backend, because the ranks of a stage must count the
        same collectives.
        """
        backend = self._backend(groups)
        handles = {ranks: self._new(ranks, backend) for ranks in groups}
        ranks = next(ranks for ranks in groups if self.rank in ranks)
        return group_of(ranks, self.rank, handles[ranks], backend, self.spans)

    def group_in_step(self, groups: tuple[tuple[int, ...], ...], step_id: int) -> RankGroup:
        """Make the group of this rank, together with only the ranks of `groups`, which all run step `step_id`.

        `torch.distributed.new_group` cannot do this: it involves all ranks of the world, or names groups by their
        number on the caller, which differs between ranks.
        """
        ranks = next(ranks for ranks in groups if self.rank in ranks)
        store = dist.PrefixStore(f"{'-'.join(map(str, ranks))}@{step_id}", _get_default_store())
        place = store, ranks.index(self.rank), len(ranks)
        backend = self._backend(groups)
        handle: dist.ProcessGroup | dist.Backend
        match backend:
            case "shm":
                from longhelix.compute.parallel.shared_memory import SharedMemoryProcessGroup

                handle = SharedMemoryProcessGroup(*place, default_pg_timeout)
            case "hosts":
                from longhelix.compute.parallel.across_hosts import HostsProcessGroup

                handle = HostsProcessGroup(*place, default_pg_timeout, self._parts(ranks))
            case "gloo":
                handle = dist.ProcessGroupGloo(*place, default_pg_timeout)
            case "nccl":
                handle = dist.ProcessGroupNCCL(*place, dist.ProcessGroupNCCL.Options())
            case other:
                raise AssertionError(other)
        return group_of(ranks, self.rank, handle, backend, self.spans)

    def _new(self, ranks: tuple[int, ...], backend: str | None) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        return dist.new_group(ranks, backend=backend, pg_options=self._parts(ranks) if backend == "hosts" else None)

    def _backend(self, groups: tuple[tuple[int, ...], ...]) -> str | None:
        is_across = any(len(self.hosts.parts(ranks)) > 1 for ranks in groups)
        return "hosts" if self.backend == "shm" and is_across else self.backend

    def _parts(self, ranks: tuple[int, ...]) -> list[list[int]]:
        """Return the positions in a group of the ranks of each host that runs some, in the order of hosts."""
        return [[ranks.index(rank) for rank in part] for part in self.hosts.parts(ranks)]


def _share_memory(hosts: Hosts) -> bool:
    """Return whether the ranks of every host of a gloo world can share memory. All ranks get the same answer."""
    if dist.get_backend() != "gloo":
        return False
    # Ranks can open each other's memory if they share the boot of a kernel, its process table, and the user.
    kernel, processes = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    if not (native.module and kernel.exists() and processes.exists()):
        place = os.urandom(16)  # equal to no other rank's
    else:
        place = f"{kernel.read_text()} {os.readlink(processes)} {os.getuid()}".encode()
    place_hash = torch.frombuffer(bytearray(hashlib.sha256(place).digest()), dtype=torch.uint8)
    places = [torch.empty_like(place_hash) for _ in range(hosts.world_size)]
    dist.all_gather(places, place_hash)
    return all(torch.equal(places[ranks[0]], places[rank]) for ranks in hosts.ranks for rank in ranks)
