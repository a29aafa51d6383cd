"""The torch.distributed backend "hosts": CPU tensors, ranks of several hosts. Ranks of one host share memory.

Each collective has a part inside of every host, over shared memory, and a part between hosts, over gloo. Sums add the
ranks of each host in rank order, and then the hosts in their order. The same placement of ranks gives the same bits.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from longhelix.compute.parallel.collectives import sum_in_order
from longhelix.compute.parallel.process_group import PythonProcessGroup, done
from longhelix.compute.parallel.shared_memory import SharedMemoryProcessGroup

NAME = "hosts"


class HostsProcessGroup(PythonProcessGroup):
    """A process group whose ranks are on several hosts.

    The first rank of each host is its leader, which exchanges what the host has to say with the other leaders. In
    all-to-alls every rank sends to every other rank directly.

    Attributes:
        network_bytes: bytes that this rank has sent to ranks of other hosts.
    """

    backend = NAME

    def __init__(
        self, store: dist.Store, rank: int, size: int, timeout: timedelta, parts: Sequence[Sequence[int]]
    ) -> None:
        """Args:
        parts: positions in the group of the ranks of each host, ascending, in the order of hosts.
        """
        super().__init__(rank, size)
        self.network_bytes = 0
        self._parts = parts
        self._host = next(host for host, part in enumerate(parts) if rank in part)
        self._own = parts[self._host]
        self._is_leader = rank == self._own[0]
        self._local = self._leaders = None
        if len(self._own) > 1:
            local_store = dist.PrefixStore(f"host{self._host}", store)
            self._local = SharedMemoryProcessGroup(local_store, self._own.index(rank), len(self._own), timeout)
        if self._is_leader and len(parts) > 1:
            self._leaders = dist.ProcessGroupGloo(dist.PrefixStore("leaders", store), self._host, len(parts), timeout)
        self._network = None
        if len(parts) > 1:
            self._network = dist.ProcessGroupGloo(dist.PrefixStore("network", store), rank, size, timeout)

    def allreduce(self, tensors, options=None):
        self._check_sum(options)
        for values in tensors:
            dense = values.contiguous()
            if self._local is not None:
                self._local.allreduce([dense])
            if self._leaders is not None:
                dense.copy_(sum_in_order(self._of_hosts(dense)))
            self._tell(dense)
            if dense is not values:
                values.copy_(dense)
        return done(tensors)

    def _allgather_base(self, gathered, values, options=None):
        shards = gathered.view(self.size(), *values.shape)
        most = max(map(len, self._parts))
        own = values.new_empty(most, *values.shape)  # as many for every host, since gloo gathers equal sizes
        if self._local is None:
            own[0] = values
        else:
            self._local._allgather_base(own[: len(self._own)], values)
        if self._is_leader:
            for part, found in zip(self._parts, self._of_hosts(own), strict=True):
                for place, shard in zip(part, found, strict=False):
                    shards[place] = shard
        self._tell(gathered)
        return done([gathered])

    def _reduce_scatter_base(self, reduced, values, options=None):
        self._check_sum(options)
        total = values.contiguous().view(self.size(), *reduced.shape).clone()
        if self._local is not None:
            self._local.allreduce([total])
        own = total[list(self._own)]
        if self._leaders is not None:
            own = sum_in_order(self._shares(total))
        self._tell(own)
        reduced.copy_(own[self._own.index(self.rank())])
        return done([reduced])

    def broadcast(self, tensors, options=None):
        root = 0 if options is None else options.rootRank
        host = next(host for host, part in enumerate(self._parts) if root in part)
        for values in tensors:
            dense = values.contiguous()
            if host == self._host:
                self._tell(dense, self._own.index(root))
            if self._leaders is not None:
                spread = dist.BroadcastOptions()
                spread.rootRank = host
                self._leaders.broadcast([dense], spread).wait()
                self.network_bytes += dense.nbytes * (len(self._parts) - 1) * (host == self._host)
            if host != self._host:
                self._tell(dense)
            if dense is not values:
                values.copy_(dense)
        return done(tensors)

    def barrier(self, options=None):
        self.allreduce([torch.zeros(1)])
        return done([])

    def alltoall_base(self, received, send, received_sizes, send_sizes, options=None):
        """Pieces of the first dim to and from all ranks; empty sizes mean equal pieces."""
        equal = [len(send) // self.size()] * self.size()
        self.start_all_to_all(received, send, received_sizes or equal, send_sizes or equal).wait()
        return done([received])

    def start_all_to_all(
        self, received: Tensor, send: Tensor, received_sizes: Sequence[int], send_sizes: Sequence[int]
    ) -> dist.Work:
        """Begin an all-to-all. Pieces for other hosts travel until the result's `wait` is called."""
        outward = [0 if place in self._own else size for place, size in enumerate(send_sizes)]
        inward = [0 if place in self._own else size for place, size in enumerate(received_sizes)]
        pieces = send.split(list(send_sizes))
        remote = torch.cat([piece for piece, size in zip(pieces, outward, strict=True) if size] or [send[:0]])
        arrived = received.new_empty(sum(inward), *received.shape[1:])
        work = None if self._network is None else self._network.alltoall_base(arrived, remote, inward, outward)
        self.network_bytes += remote.nbytes
        starts = [0, *accumulate(received_sizes)]
        if self._local is None:
            place = self.rank()
            received[starts[place] : starts[place + 1]] = pieces[place]
        else:
            local = torch.cat([pieces[place] for place in self._own])
            sizes = [received_sizes[place] for place in self._own]
            found = received.new_empty(sum(sizes), *received.shape[1:])
            self._local.alltoall_base(found, local, sizes, [send_sizes[place] for place in self._own])
            for place, piece in zip(self._own, found.split(sizes), strict=True):
                received[starts[place] : starts[place + 1]] = piece

        def put() -> None:
            for place, piece in enumerate(arrived.split(inward)):
                if place not in self._own:
                    received[starts[place] : starts[place + 1]] = piece

        return _Travelling(work, put)

    def _of_hosts(self, values: Tensor) -> list[Tensor]:
        """Return equal shapes of all hosts, in their order. Leaders only."""
        if self._leaders is None:
            return [values]
        found = [torch.empty_like(values) for _ in self._parts]
        self._leaders.allgather([found], [values]).wait()
        self.network_bytes += values.nbytes * (len(self._parts) - 1)
        return found

    def _shares(self, total: Tensor) -> list[Tensor]:
        """Return what each host has of this host's part of `total`. Leaders only."""
        send = torch.cat([total[list(part)] for part in self._parts])
        sizes, own = [len(part) for part in self._parts], len(self._own)
        received = total.new_empty(own * len(self._parts), *total.shape[1:])
        self._leaders.alltoall_base(received, send, [own] * len(self._parts), sizes).wait()
        self.network_bytes += send.nbytes - own * total[0].nbytes
        return list(received.split(own))

    def _tell(self, values: Tensor, root: int = 0) -> None:
        """Give what one rank of this host has to its other ranks."""
        if self._local is not None:
            options = dist.BroadcastOptions()
            options.rootRank = root
            self._local.broadcast([values], options)


class _Travelling(dist.Work):
    """A transfer between hosts, and what to do with what has arrived."""

    def __init__(self, work: dist.Work | None, put: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._put = work or done([]), put

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait()
        self._put()
        return True

    def get_future(self) -> Future:
        return self._work.get_future()


def register() -> None:
    """Make `dist.new_group(ranks, backend=NAME, pg_options=parts)` known to this process. May be called repeatedly."""

    def make(given, parts):
        return HostsProcessGroup(given.store, given.group_rank, given.group_size, timeout=given.timeout, parts=parts)

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, make, extended_api=True, devices=["cpu"])
