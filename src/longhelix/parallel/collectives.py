"""Collectives of one group of ranks, counting what they send."""

import torch
import torch.distributed as dist
from torch import Tensor


class PeerLostError(RuntimeError):
    """A collective failed because another rank is gone: a consequence, never the first cause."""


class Group:
    """The ranks of one group, in its order. A group of one does nothing and sends nothing.

    `exchanged_bytes` counts what this rank handed to the transport for other ranks in `all_to_all`.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, handle: dist.ProcessGroup | None) -> None:
        self.ranks = ranks
        self.index = ranks.index(rank)
        self.exchanged_bytes = 0
        self._handle = handle

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over the group, in place."""
        if self.size > 1:
            self._run("allreduce", [values])
        return values

    def all_to_all(self, send: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> Tensor:
        """Send consecutive pieces of a flat tensor to the ranks of the group; returns what came, in their order."""
        received = send.new_empty(sum(receive_sizes))
        self._run("alltoall_base", received, send, receive_sizes, send_sizes)
        self.exchanged_bytes += (sum(send_sizes) - send_sizes[self.index]) * send.element_size()
        return received

    def gather(self, values: Tensor) -> list[Tensor]:
        """Equal shapes from every rank, in order, on the group's first rank; an empty list on the others."""
        if self.size == 1:
            return [values]
        parts = [torch.empty_like(values) for _ in self.ranks] if self.index == 0 else []
        self._run("gather", [parts] if parts else [], [values.contiguous()], dist.GatherOptions())
        return parts

    def broadcast(self, values: Tensor) -> Tensor:
        """The first rank's values, in place, on all."""
        if self.size > 1:
            self._run("broadcast", [values], dist.BroadcastOptions())
        return values

    def _run(self, collective: str, *arguments) -> None:
        # The process group itself and not torch.distributed's functions, which add 5 us of checks to each call.
        try:
            getattr(self._handle, collective)(*arguments).wait()
        except RuntimeError as error:
            raise PeerLostError(f"{collective} over ranks {self.ranks}: {error}") from error
