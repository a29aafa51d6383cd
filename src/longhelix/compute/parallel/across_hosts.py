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

    The first rank of each host is its leader, and exchanges values with the other leaders. In all-to-alls, every rank
    sends to every other rank directly.

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
        self._host_ranks = parts[self._host]
        self._is_leader = rank == self._host_ranks[0]
        self._local = self._leaders = None
        if len(self._host_ranks) > 1:
            local_store = dist.PrefixStore(f"host{self._host}", store)
            self._local = SharedMemoryProcessGroup(
                local_store, self._host_ranks.index(rank), len(self._host_ranks), timeout
            )
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
                dense.copy_(sum_in_order(self._gather_hosts(dense)))
            self._broadcast_in_host(dense)
            if dense is not values:
                values.copy_(dense)
        return done(tensors)

    def _allgather_base(self, gathered, values, options=None):
        shards = gathered.view(self.size(), *values.shape)
        largest_host = max(map(len, self._parts))
        host_shards = values.new_empty(
            largest_host, *values.shape
        )  # equal sizes for all hosts, because gloo gathers equal sizes
        if self._local is None:
            host_shards[0] = values
        else:
            self._local._allgather_base(host_shards[: len(self._host_ranks)], values)
        if self._is_leader:
            for part, of_host in zip(self._parts, self._gather_hosts(host_shards), strict=True):
                for place, shard in zip(part, of_host, strict=False):
                    shards[place] = shard
        self._broadcast_in_host(gathered)
        return done([gathered])

    def _reduce_scatter_base(self, reduced, values, options=None):
        self._check_sum(options)
        total = values.contiguous().view(self.size(), *reduced.shape).clone()
        if self._local is not None:
            self._local.allreduce([total])
        host_shards = total[list(self._host_ranks)]
        if self._leaders is not None:
            host_shards = sum_in_order(self._exchange_shares(total))
        self._broadcast_in_host(host_shards)
        reduced.copy_(host_shards[self._host_ranks.index(self.rank())])
        return done([reduced])

    def broadcast(self, tensors, options=None):
        root = 0 if options is None else options.rootRank
        host = next(host for host, part in enumerate(self._parts) if root in part)
        for values in tensors:
            dense = values.contiguous()
            if host == self._host:
                self._broadcast_in_host(dense, self._host_ranks.index(root))
            if self._leaders is not None:
                spread = dist.BroadcastOptions()
                spread.rootRank = host
                self._leaders.broadcast([dense], spread).wait()
                self.network_bytes += dense.nbytes * (len(self._parts) - 1) * (host == self._host)
            if host != self._host:
                self._broadcast_in_host(dense)
            if dense is not values:
                values.copy_(dense)
        return done(tensors)

    def barrier(self, options=None):
        self.allreduce([torch.zeros(1)])
        return done([])

    def alltoall_base(self, received, send, received_sizes, send_sizes, options=None):
        """Exchange pieces of the first dim with all ranks. Empty sizes mean equal pieces."""
        equal = [len(send) // self.size()] * self.size()
        self.start_all_to_all(received, send, received_sizes or equal, send_sizes or equal).wait()
        return done([received])

    def start_all_to_all(
        self, received: Tensor, send: Tensor, received_sizes: Sequence[int], send_sizes: Sequence[int]
    ) -> dist.Work:
        """Begin an all-to-all. Pieces for other hosts travel until the caller calls `wait` on the result."""
        outward = [0 if place in self._host_ranks else size for place, size in enumerate(send_sizes)]
        inward = [0 if place in self._host_ranks else size for place, size in enumerate(received_sizes)]
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
            local = torch.cat([pieces[place] for place in self._host_ranks])
            sizes = [received_sizes[place] for place in self._host_ranks]
            from_host = received.new_empty(sum(sizes), *received.shape[1:])
            self._local.alltoall_base(from_host, local, sizes, [send_sizes[place] for place in self._host_ranks])
            for place, piece in zip(self._host_ranks, from_host.split(sizes), strict=True):
                received[starts[place] : starts[place + 1]] = piece

        def store_arrived() -> None:
            for place, piece in enumerate(arrived.split(inward)):
                if place not in self._host_ranks:
                    received[starts[place] : starts[place + 1]] = piece

        return _HostTransfer(work, store_arrived)

    def _gather_hosts(self, values: Tensor) -> list[Tensor]:
        """Gather equal shapes from all hosts, in their order. Leaders only."""
        if self._leaders is None:
            return [values]
        gathered = [torch.empty_like(values) for _ in self._parts]
        self._leaders.allgather([gathered], [values]).wait()
        self.network_bytes += values.nbytes * (len(self._parts) - 1)
        return gathered

    def _exchange_shares(self, total: Tensor) -> list[Tensor]:
        """Exchange parts of `total`: returns each host's values for the ranks of this host. Leaders only."""
        send = torch.cat([total[list(part)] for part in self._parts])
        sizes, num_local = [len(part) for part in self._parts], len(self._host_ranks)
        received = total.new_empty(num_local * len(self._parts), *total.shape[1:])
        self._leaders.alltoall_base(received, send, [num_local] * len(self._parts), sizes).wait()
        self.network_bytes += send.nbytes - num_local * total[0].nbytes
        return list(received.split(num_local))

    def _broadcast_in_host(self, values: Tensor, root: int = 0) -> None:
        """Broadcast values of one rank of this host to its other ranks."""
        if self._local is not None:
            options = dist.BroadcastOptions()
            options.rootRank = root
            self._local.broadcast([values], options)


class _HostTransfer(dist.Work):
    """A transfer between hosts, and a function that stores the arrived pieces."""

    def __init__(self, work: dist.Work | None, store_arrived: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._store_arrived = work or done([]), store_arrived

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait()
        self._store_arrived()
        return True

    def get_future(self) -> Future:
        return self._work.get_future()


def register() -> None:
    """Make `dist.new_group(ranks, backend=NAME, pg_options=parts)` known to this process. May be called repeatedly."""

    def make(options, parts):
        return HostsProcessGroup(
            options.store, options.group_rank, options.group_size, timeout=options.timeout, parts=parts
        )

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, make, extended_api=True, devices=["cpu"])
