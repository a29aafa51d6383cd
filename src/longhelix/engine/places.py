"""The hosts that run an engine's ranks, and what each of them has."""

from collections.abc import Sequence
from dataclasses import dataclass

from longhelix.compute.machine import host
from longhelix.compute.machine.devices import free_gpu_bytes
from longhelix.spec.hosts import Hosts
from longhelix.spec.layout import Layout


@dataclass(frozen=True)
class Places:
    """Which host runs each rank, and what the hosts have, by node rank."""

    hosts: Hosts
    cores: Sequence[int]
    free_bytes: Sequence[int]  # free memory
    gpu_bytes: Sequence[Sequence[int]]  # free memory of each GPU

    @classmethod
    def here(cls, layout: Layout, with_gpus: bool) -> "Places":
        """Place all ranks on this host."""
        gpu_bytes = free_gpu_bytes() if with_gpus else []
        hosts = Hosts.in_order([layout.world_size])
        return cls(hosts, (host.cores(),), (host.available_bytes(),), (gpu_bytes,))

    @property
    def lacking_gpus(self) -> int | None:
        """The first host that has fewer GPUs than ranks, or None."""
        return next(
            (node for node, ranks in enumerate(self.hosts.ranks) if len(self.gpu_bytes[node]) < len(ranks)), None
        )

    def where(self, node: int) -> str:
        """Return " on host 1", or an empty string if there is only one host."""
        return f" on host {node}" if len(self.hosts.ranks) > 1 else ""
