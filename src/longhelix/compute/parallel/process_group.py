"""What the process groups of this package have in common: torch.distributed groups that are written in Python."""

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # what torch's own Python process groups use
from torch.futures import Future


class PythonProcessGroup(dist.ProcessGroup):
    """A process group whose calls are complete when they return, and so is their Work. The only reduction is the sum.

    Subclasses define `backend` and the collectives `allreduce`, `alltoall_base`, `_allgather_base`,
    `_reduce_scatter_base`, `broadcast` and `barrier`. This class has the forms that follow from these.

    Attributes:
        backend: name of the torch.distributed backend.
    """

    backend: str

    # torch's own names; its C++ asks a Python group for these, and keeps them itself only for groups written in C++.
    def getBackendName(self) -> str:  # noqa: N802
        return self.backend

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def allgather(self, gathered, values, options=None):
        for shards, value in zip(gathered, values, strict=True):
            for shard, received in zip(shards, self._gathered(value), strict=True):
                shard.copy_(received)
        return done(gathered)

    def gather(self, gathered, values, options):
        """Gather on one rank. It costs as much as an all-gather, because all ranks take part in that."""
        for index, value in enumerate(values):
            all_shards = self._gathered(value)
            if self.rank() == options.rootRank:
                for shard, received in zip(gathered[index], all_shards, strict=True):
                    shard.copy_(received)
        return done(values)

    def _gathered(self, value: Tensor) -> Tensor:
        all_shards = value.new_empty(self.size(), *value.shape)
        self._allgather_base(all_shards, value.contiguous())
        return all_shards

    # Functional collectives reach a Python group by the coalesced forms alone.
    def allgather_into_tensor_coalesced(self, gathered, values, options=None):
        for all_shards, value in zip(gathered, values, strict=True):
            self._allgather_base(all_shards, value.contiguous())
        return done(gathered)

    def reduce_scatter_tensor_coalesced(self, reduced, values, options=None):
        for shard, value in zip(reduced, values, strict=True):
            self._reduce_scatter_base(shard, value, options)
        return done(reduced)

    def _check_sum(self, options) -> None:
        if options is not None and options.reduceOp != dist.ReduceOp.SUM:
            raise ValueError(
                f"the {self.backend} backend only sums, but was asked for {options.reduceOp}: use gloo for this group"
            )


def done(result):
    """Return a Work that is complete."""
    future = Future()
    future.set_result(result)
    return _create_work_from_future(future)
