"""The torch.distributed backend "shm": ranks of one host, CPU tensors, native collectives over one shared segment.

The segment is an anonymous file that only its ranks keep open, so it disappears when they end.
"""

import os
import re
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor

from longhelix.compute.kernels import native
from longhelix.compute.parallel.process_group import PythonProcessGroup, done

NAME = "shm"


class SharedMemoryProcessGroup(PythonProcessGroup):
    """A process group over `native.module.Channel`.

    Raises PeerLostError, with the name of the peer, if a peer ends or does not take part within `timeout`. Raises
    CollectivesDifferError if a peer runs another collective. Sums add the ranks in rank order, so all ranks and all
    runs get the same bits.
    """

    backend = NAME

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.channel = _join(store, rank, size, timeout.total_seconds())

    def allreduce(self, tensors, options=None):
        self._check_sum(options)
        for values in tensors:
            dense = values.contiguous()
            self.channel.all_reduce(dense.data_ptr(), dense.numel(), _number(dense))
            if dense is not values:
                values.copy_(dense)
        return done(tensors)

    def alltoall_base(self, received, send, received_sizes, send_sizes, options=None):
        """Exchange pieces of the first dim with all ranks. Empty sizes mean equal pieces."""
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

    def _reduce_scatter_base(self, reduced, values, options=None):
        self._check_sum(options)
        values = values.contiguous()
        self.channel.reduce_scatter(values.data_ptr(), reduced.data_ptr(), reduced.numel(), _number(values))
        return done([reduced])

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
    """Create the segment on rank 0, and open it on other ranks. Returns when all ranks have it."""
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
    """Open the segment of another process. Values of the store are checked, because it may be in the network."""
    if re.fullmatch(r"\d+/fd/\d+", place) is None or not os.readlink(f"/proc/{place}").startswith("/memfd:longhelix"):
        raise RuntimeError(f"the store of ranks names {place!r} as their memory, which is none")
    return os.open(f"/proc/{place}", os.O_RDWR)


def _number(values: Tensor):
    number = native.NUMBER_BY_DTYPE.get(values.dtype)
    if number is None:
        known = ", ".join(map(str, native.NUMBER_BY_DTYPE))
        raise ValueError(f"the {NAME} backend does not sum {values.dtype}: use one of {known}")
    return number
