"""The hosts that run an engine's ranks, and what each of them has."""

from collections.abc import Sequence
from dataclasses import dataclass

from longhelix.compute.machine import host
from longhelix.compute.machine.devices import free_gpu_bytes, gpu_capabilities
from longhelix.spec.hosts import Hosts
from longhelix.spec.layout import Layout


@dataclass(frozen=True)
class Places:
    """Which host runs each rank, and what the hosts have, by node rank."""

    hosts: Hosts
    cores: Sequence[int]
    free_bytes: Sequence[int]  # free memory
    gpu_bytes: Sequence[Sequence[int]]  # free memory of each GPU
    gpu_capabilities: Sequence[Sequence[tuple[int, int]]]  # compute capability of each GPU

    @classmethod
    def here(cls, layout: Layout, with_gpus: bool) -> "Places":
        """Place all ranks on this host."""
        gpu_bytes, capabilities = (free_gpu_bytes(), gpu_capabilities()) if with_gpus else ([], [])
        hosts = Hosts.in_order([layout.world_size])
        return cls(
            hosts,
            cores=(host.cores(),),
            free_bytes=(host.available_bytes(),),
            gpu_bytes=(gpu_bytes,),
            gpu_capabilities=(capabilities,),
        )

    @property
    def lacking_gpus(self) -> int | None:
        """The first host that has fewer GPUs than ranks, or None."""
        return next(
            (node for node, ranks in enumerate(self.hosts.ranks) if len(self.gpu_bytes[node]) < len(ranks)), None
        )

    @property
    def least_capability(self) -> tuple[int, int] | None:
        """The lowest compute capability of the GPUs that run ranks. None if the driver does not tell any."""
        of_ranks = (
            capability
            for capabilities, ranks in zip(self.gpu_capabilities, self.hosts.ranks, strict=True)
            for capability in capabilities[: len(ranks)]
        )
        return min(of_ranks, default=None)

    def where(self, node: int) -> str:
        """Return " on host 1", or an empty string if there is only one host."""
        return f" on host {node}" if len(self.hosts.ranks) > 1 else ""
