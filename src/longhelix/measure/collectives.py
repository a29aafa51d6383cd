"""Measures collectives between ranks on this host, over shared memory and over gloo."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from longhelix.compute.kernels import native
from longhelix.compute.parallel import shared_memory
from longhelix.compute.runner.rank import meet
from longhelix.errors import UserError
from longhelix.measure.timing import Timing
from longhelix.measure.world import Row, collect

DTYPE = torch.bfloat16
# The threads of a gloo call keep running after the call and slow down the next call. A shared-memory call takes 18 us
# after a gloo call, but 5 us after another shared-memory call. Each backend therefore makes a burst of calls, and the
# first calls of the burst are not measured.
BURST_CALLS = 12
SETTLING_CALLS = 4


class CollectivesJob(msgspec.Struct, frozen=True):
    """Job of every rank: measures each collective at each size."""

    ranks: int
    bytes: tuple[int, ...]  # sizes of the whole tensor
    repeats: int  # number of rounds. Each round makes BURST_CALLS calls per backend

    def measure(self, rank: int, directory: Path) -> Iterator[Row]:
        native.set_num_threads(1)
        meet(self.ranks, rank, directory)
        shared_memory.register()
        groups = {name: dist.new_group(backend=name) for name in (shared_memory.NAME, "gloo")}
        for name in COLLECTIVES:
            for num_bytes in self.bytes:
                conditions = {"collective": name, "ranks": self.ranks, "bytes": num_bytes}
                yield conditions | self._point(groups, name, num_bytes)

    def _point(self, groups: dict[str, dist.ProcessGroup], name: str, num_bytes: int) -> Row:
        whole = torch.zeros(num_bytes // DTYPE.itemsize, dtype=DTYPE)
        shard = torch.zeros(len(whole) // self.ranks, dtype=DTYPE)
        calls = {backend: COLLECTIVES[name](group, whole, shard) for backend, group in groups.items()}
        timings = bursts(calls, groups[shared_memory.NAME].barrier, self.repeats)
        gloo_s, shm = timings["gloo"].median_s, timings[shared_memory.NAME]
        return {**timings["gloo"].row("gloo_s"), **shm.row("shm_s"), "speedup": gloo_s / shm.median_s}


def bursts(
    calls: Mapping[str, Callable[[], dist.Work]], barrier: Callable[[], object], repeats: int
) -> dict[str, Timing]:
    """Time collectives in turn, in bursts of BURST_CALLS calls. Each call starts after a barrier."""
    samples_s: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            for number in range(BURST_CALLS):
                barrier()
                start = time.perf_counter()
                call().wait()
                if number >= SETTLING_CALLS:
                    samples_s[name].append(time.perf_counter() - start)
    return {name: Timing.of(samples) for name, samples in samples_s.items()}


def _all_reduce(group, whole, shard) -> Callable:
    return lambda: group.allreduce([whole])


def _all_to_all(group, whole, shard) -> Callable:
    received = torch.empty_like(whole)
    return lambda: group.alltoall_base(received, whole, [], [])


def _all_gather(group, whole, shard) -> Callable:
    return lambda: group._allgather_base(whole, shard)


def _reduce_scatter(group, whole, shard) -> Callable:
    return lambda: group._reduce_scatter_base(shard, whole)


# Each function returns a callable that starts the collective and returns its work handle.
COLLECTIVES = {
    "all-reduce": _all_reduce,
    "all-to-all": _all_to_all,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
}


def measure(
    ranks: Sequence[int], sizes_bytes: tuple[int, ...], repeats: int, on_point: Callable[[Row], None]
) -> list[Row]:
    """Measure the collectives with each number of ranks in turn.

    Returns:
        A row for each collective and size.

    Raises:
        UserError: there are fewer than 2 ranks, or a size does not divide evenly among the ranks.
    """
    for count in ranks:
        _check(count, sizes_bytes)
    rows = []
    for count in ranks:
        rows += [row[0] for row in collect(CollectivesJob(count, sizes_bytes, repeats), count, on_point)]
    return rows


def _check(ranks: int, sizes_bytes: tuple[int, ...]) -> None:
    if ranks < 2:
        raise UserError(f"--ranks has {ranks}, but collectives need at least two ranks: set it to 2 or more")
    for size_bytes in sizes_bytes:
        if size_bytes % (ranks * DTYPE.itemsize):
            raise UserError(
                f"--bytes has {size_bytes}, which {ranks} ranks cannot split into {DTYPE.itemsize}-byte numbers: "
                f"set it to multiples of {ranks * DTYPE.itemsize}"
            )
