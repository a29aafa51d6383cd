"""The torch.distributed backend "shm": ranks of one host, CPU tensors, native collectives over one shared segment.

The segment is an anonymous file that only its ranks hold open: nothing of it is left when they end, however they end.
"""

import os
import re
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # what torch's own Python process groups use
from torch.futures import Future

from longhelix.compute.kernels import native

NAME = "shm"


class SharedMemoryProcessGroup(dist.ProcessGroup):
    """A process group over `native.module.Channel`. Every call is complete when it returns, and so is its Work.

    A peer that ends, or takes no part for `timeout`, raises PeerLostError, which names it. A peer that is in another
    collective raises CollectivesDifferError. The only reduction is the sum, in rank order: the same bits on all ranks
    and in every run.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.channel = _join(store, rank, size, timeout.total_seconds())

    # torch's own names; its C++ asks a Python group for these, and keeps them itself only for groups written in C++.
    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def allreduce(self, tensors, options=None):
        check_sum(options)
        for values in tensors:
            dense = values.contiguous()
            self.channel.all_reduce(dense.data_ptr(), dense.numel(), _number(dense))
            if dense is not values:
                values.copy_(dense)
        return done(tensors)

    def alltoall_base(self, received, send, received_sizes, send_sizes, options=None):
        """Pieces of the first dim to and from all ranks; empty sizes mean equal pieces."""
        size = self.size()
        row_bytes = send[:1].nbytes or received[:1].nbytes
        send_bytes = [rows * row_bytes for rows in send_sizes] or [send.nbytes // size] * size
        received_bytes = [rows * row_bytes for rows in received_sizes] or [received.nbytes // size] * size
        send = send.contiguous()
        self.channel.all_to_all(send.data_ptr(), send_bytes, received.data_ptr(), received_bytes)
        return done([received])

    def _allgather_base(self, gathered, values, options=None):
        values = values.contiguous()
        self.channel.all_gather(values.data_ptr(), gathered.data_ptr(), values.nbytes)
        return done([gathered])

    def allgather(self, gathered, values, options=None):
        for shards, value in zip(gathered, values, strict=True):
            for shard, received in zip(shards, self._gathered(value), strict=True):
                shard.copy_(received)
        return done(gathered)

    def gather(self, gathered, values, options):
        # On one host a gather costs what an all-gather costs.
        for index, value in enumerate(values):
            whole = self._gathered(value)
            if self.rank() == options.rootRank:
                for shard, received in zip(gathered[index], whole, strict=True):
                    shard.copy_(received)
        return done(values)

    def _gathered(self, value: Tensor) -> Tensor:
        whole = value.new_empty(self.size(), *value.shape)
        self._allgather_base(whole, value)
        return whole

    def _reduce_scatter_base(self, reduced, values, options=None):
        check_sum(options)
        values = values.contiguous()
        self.channel.reduce_scatter(values.data_ptr(), reduced.data_ptr(), reduced.numel(), _number(values))
        return done([reduced])

    # Functional collectives reach a Python group by the coalesced forms alone.
    def allgather_into_tensor_coalesced(self, gathered, values, options=None):
        for whole, value in zip(gathered, values, strict=True):
            self._allgather_base(whole, value)
        return done(gathered)

    def reduce_scatter_tensor_coalesced(self, reduced, values, options=None):
        for shard, value in zip(reduced, values, strict=True):
            self._reduce_scatter_base(shard, value, options)
        return done(reduced)

    def broadcast(self, tensors, options=None):
        root = 0 if options is None else options.rootRank
        for values in tensors:
            dense = values.contiguous()
            self.channel.broadcast(dense.data_ptr(), dense.nbytes, root)
            if dense is not values:
                values.copy_(dense)
        return done(tensors)

    def barrier(self, options=None):
        self.channel.barrier()
        return done([])


def register() -> None:
    """Make `dist.new_group(ranks, backend=NAME)` known to this process. May be called more than once."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, SharedMemoryProcessGroup, devices=["cpu"])


def _join(store: dist.Store, rank: int, size: int, timeout_s: float):
    """Rank 0 makes the segment; the others open it through its descriptor. All have it before any goes on."""
    if rank == 0:
        fd = os.memfd_create("longhelix")
        os.truncate(fd, native.module.Channel.segment_bytes(size))
        store.set("segment", f"{os.getpid()}/fd/{fd}")
    else:
        fd = _open_segment(store.get("segment").decode())
    store.set(f"process/{rank}", f"{os.getpid()} {dist.get_rank()}")
    processes = [store.get(f"process/{peer}").decode().split() for peer in range(size)]
    pids, ranks = ([int(number) for number in numbers] for numbers in zip(*processes, strict=True))
    channel = native.module.Channel(fd, rank, pids, ranks, timeout_s)
    channel.barrier()
    os.close(fd)
    return channel


def _open_segment(place: str) -> int:
    """Open the segment of another process. The store may be in the network, so what it says is checked."""
    if re.fullmatch(r"\d+/fd/\d+", place) is None or not os.readlink(f"/proc/{place}").startswith("/memfd:longhelix"):
        raise RuntimeError(f"the store of ranks names {place!r} as their memory, which is none")
    return os.open(f"/proc/{place}", os.O_RDWR)


def done(result):
    future = Future()
    future.set_result(result)
    return _create_work_from_future(future)


def check_sum(options) -> None:
    if options is not None and options.reduceOp != dist.ReduceOp.SUM:
        raise ValueError(f"the {NAME} backend only sums, but was asked for {options.reduceOp}: use gloo for this group")


def _number(values: Tensor):
    number = native.NUMBER_BY_DTYPE.get(values.dtype)
    if number is None:
        known = ", ".join(map(str, native.NUMBER_BY_DTYPE))
        raise ValueError(f"the {NAME} backend does not sum {values.dtype}: use one of {known}")
    return number
