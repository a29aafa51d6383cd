"""Collectives of a group of ranks, with counts of the collectives and of the bytes that they send."""

import time
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from longhelix.compute.kernels import native
from longhelix.compute.parallel.traffic import Traffic
from longhelix.errors import PeerLostError
from longhelix.spans import UNTRACED, Spans
from longhelix.spec.layout import split

_PIECE_BYTES, _MOST_PIECES = 256 * 1024, 16  # docs/internals/speed.md, "What bounds the numbers"


def is_lost_peer(error: RuntimeError) -> bool:
    """Return whether an error of gloo or NCCL means that a peer is gone, and not that a call was wrong."""
    message = str(error)
    # A missing network interface is an error of this rank.
    return isinstance(error, dist.DistError) or ("gloo/transport" in message and "/device.cc" not in message)


def _in_graphs(form: Callable) -> Callable[[Callable], Callable]:
    """Decorator: replaces the method by `form` inside of compiled graphs. Steps that run op by op call the method."""

    def decorate(method: Callable) -> Callable:
        @wraps(method)
        def call(*arguments, **named):
            return (form if torch.compiler.is_compiling() else method)(*arguments, **named)

        return call

    return decorate


def _functional_all_reduce(group: "RankGroup", values: Tensor) -> Tensor:
    return values if group.size == 1 else functional.all_reduce(values, "sum", group._handle)


def _functional_all_to_all(
    group: "RankGroup", send: Tensor, send_sizes: list[int], receive_sizes: list[int]
) -> Callable[[], Tensor]:
    received = functional.all_to_all_single(send, receive_sizes, send_sizes, group._handle)
    return lambda: received


def _functional_all_gather(group: "RankGroup", values: Tensor) -> Callable[[], Tensor]:
    whole = values if group.size == 1 else functional.all_gather_tensor(values, 0, group._handle)
    return lambda: whole


def _functional_reduce_scatter(group: "RankGroup", values: Tensor) -> Callable[[], Tensor]:
    if group.size > 1 and group.is_gloo:
        rows = [values.shape[0] // group.size] * group.size
        values = sum_in_order(functional.all_to_all_single(values, rows, rows, group._handle).split(rows))
    elif group.size > 1:
        values = functional.reduce_scatter_tensor(values, "sum", 0, group._handle)
    return lambda: values


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors of equal shape. 16-bit formats are added in float32 and rounded once."""
    dtype = parts[0].dtype
    total = parts[0].float() if dtype in (torch.bfloat16, torch.float16) else parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)


def _pieces(values: Tensor) -> list[slice]:
    """Split the rows for each rank into pieces, so that gloo sends in both directions at once."""
    count = max(min(values.nbytes // _PIECE_BYTES, len(values), _MOST_PIECES), 1)
    return [slice(part.start, part.stop) for part in split(len(values), count)]


class RankGroup:
    """A group of ranks, seen from one of them. Methods raise PeerLostError if a peer is gone.

    A group of one rank does nothing and sends nothing. `traffic` must be the same on all ranks, except for its bytes.

    Attributes:
        ranks: The ranks, in the order of the group.
        index: Index of this rank in the group.
        sums_in_rank_order: Sums have the same bits for all message sizes. Those of gloo differ, from three ranks on.
        overlaps: Messages travel while this rank computes.
        waited_s: Seconds that this rank has waited for started collectives. Almost 0 on GPUs, where streams wait.

    Args:
        rank: This rank.
        handle: The group in torch. None: this rank is alone.
        spans: Records all collectives outside of compiled graphs.
    """

    def __init__(
        self, ranks: tuple[int, ...], rank: int, handle: dist.ProcessGroup | None, spans: Spans = UNTRACED
    ) -> None:
        self.ranks = ranks
        self.size = len(ranks)
        self.index = ranks.index(rank)
        self.sums_in_rank_order = self.size == 1
        # Gloo's reduce-scatter sends as much as its all-reduce, and large messages one direction after the other.
        self.is_gloo = self.size > 1 and isinstance(handle, dist.ProcessGroup) and handle.name() == "gloo"
        self.overlaps = self.size > 1
        self.waited_s = 0.0
        self._handle = handle
        self._spans = spans
        self._counted = Traffic()  # counted by this object
        self._current = ""

    @property
    def traffic(self) -> Traffic:
        """All collectives so far, without those that compiled graphs run over gloo or NCCL."""
        return self._counted

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group in torch, which compiled graphs use. None for a single rank."""
        return self._handle

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that this rank has sent to other ranks in `all_to_all` and `exchange_states`."""
        return self.traffic.exchanged_bytes

    @property
    def network_bytes(self) -> int:
        """Bytes that this rank has sent to ranks of other hosts.

        Always 0 if all ranks of the group are on one host, or if gloo or NCCL carries the group's collectives.
        """
        return 0

    def count(self, traffic: Traffic) -> None:
        """Add the collectives of a CUDA graph, which does not call this object."""
        self._counted = self._counted.then(traffic)

    def progress(self) -> tuple[int, str]:
        """Return the number of collectives so far, and the running one in words or "". Any thread may call this."""
        return self._counted.collectives, self._named(self._current)

    @_in_graphs(_functional_all_reduce)
    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over the group, in place. In a compiled graph, the result is a new tensor."""
        if self.size > 1:
            self._run("all-reduce", values.nbytes, self._handle.allreduce, [values])
        return values

    def all_reduce_add(self, values: Tensor, residual: Tensor) -> Tensor:
        """Return residual + the sum of `values` over the group. May overwrite `values`."""
        return residual + self.all_reduce(values)

    def all_gather(self, values: Tensor) -> Tensor:
        """Gather this rank's rows (L, ...) and those of all others, in the order of ranks: (n L, ...)."""
        return self.start_all_gather(values)()

    @_in_graphs(_functional_all_gather)
    def start_all_gather(self, values: Tensor) -> Callable[[], Tensor]:
        """Begin an `all_gather`. Call the returned function to wait for the result."""
        if self.size == 1:
            return lambda: values
        values = values.contiguous()
        whole = values.new_empty(self.size * len(values), *values.shape[1:])
        if self.is_gloo:
            parts = whole.view(self.size, *values.shape)
            pieces = [([[*parts[:, rows]]], [values[rows]]) for rows in _pieces(values)]
            wait = self._start("all-gather", values.nbytes, self._handle.allgather, *pieces)
        else:
            wait = self._start("all-gather", values.nbytes, self._handle._allgather_base, (whole, values))

        def finish() -> Tensor:
            wait()
            return whole

        return finish

    def reduce_scatter(self, values: Tensor) -> Tensor:
        """Sum (n L, ...) over the group, and return this rank's rows (L, ...) of the sum."""
        return self.start_reduce_scatter(values)()

    @_in_graphs(_functional_reduce_scatter)
    def start_reduce_scatter(self, values: Tensor) -> Callable[[], Tensor]:
        """Begin a `reduce_scatter`. Call the returned function to wait for the result."""
        if self.size == 1:
            return lambda: values
        parts = values.contiguous().view(self.size, len(values) // self.size, *values.shape[1:])
        if not self.is_gloo:
            shard_X = torch.empty_like(parts[0])
            wait = self._start("reduce-scatter", values.nbytes, self._handle._reduce_scatter_base, (shard_X, parts))
        else:
            sent = [parts[:, rows].flatten(0, 1).contiguous() for rows in _pieces(parts[0])]
            received = [torch.empty_like(each) for each in sent]
            sizes = [[len(each) // self.size] * self.size for each in sent]
            pieces = zip(received, sent, sizes, sizes, strict=True)
            wait = self._start("reduce-scatter", values.nbytes, self._handle.alltoall_base, *pieces)

        def finish() -> Tensor:
            wait()
            return torch.cat([sum_in_order(each.chunk(self.size)) for each in received]) if self.is_gloo else shard_X

        return finish

    def merges(self, head_size: int) -> bool:
        """Return whether `exchange_states` can exchange and merge in one call."""
        return False

    def all_to_all(self, send: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> Tensor:
        """Send consecutive pieces of a flat tensor to the ranks of the group. Returns the received pieces in the order
        of ranks."""
        return self.start_all_to_all(send, send_sizes, receive_sizes)()

    @_in_graphs(_functional_all_to_all)
    def start_all_to_all(self, send: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> Callable[[], Tensor]:
        """Begin an `all_to_all`. Call the returned function to wait for the result."""
        # The fingerprint leaves out sizes, because they differ by rank.
        title, received = self._begin("all-to-all", 0), send.new_empty(sum(receive_sizes))
        span = self._spans.begin("exchange", "exchange")
        work = self._call(title, self._send_to_all, received, send, receive_sizes, send_sizes)
        self._spans.end_with(span, work)
        self.count(Traffic(exchanged_bytes=(sum(send_sizes) - send_sizes[self.index]) * send.element_size()))

        def finish() -> Tensor:
            before_s = time.perf_counter()
            self._call(title, work.wait)
            self.waited_s += time.perf_counter() - before_s
            return received

        return finish

    def _send_to_all(self, *arguments) -> dist.Work:
        return self._handle.alltoall_base(*arguments)

    def gather(self, values: Tensor) -> list[Tensor]:
        """Gather equal shapes from all ranks, in order, on the group's first rank. Other ranks get an empty list."""
        if self.size == 1:
            return [values]
        gathered = [torch.empty_like(values) for _ in self.ranks] if self.index == 0 else []
        receivers = [gathered] if gathered else []
        self._run("gather", values.nbytes, self._handle.gather, receivers, [values.contiguous()], dist.GatherOptions())
        return gathered

    def broadcast(self, values: Tensor, root: int = 0) -> Tensor:
        """Overwrite `values` on all ranks by the values of the rank with index `root`."""
        if self.size > 1:
            options = dist.BroadcastOptions()
            options.rootRank = root
            self._run("broadcast", values.nbytes, self._handle.broadcast, [values], options)
        return values

    def _run(self, kind: str, size_bytes: int, collective: Callable, *arguments) -> None:
        # Calls the process group directly, because the functions of torch.distributed add 5 us of checks to each call.
        span = self._spans.begin(kind, "collective")
        self._call(self._begin(kind, size_bytes), lambda: collective(*arguments).wait())
        self._spans.end(span)

    def _start(self, kind: str, size_bytes: int, collective: Callable, *pieces: tuple[Any, ...]) -> Callable[[], None]:
        """Begin one collective, with a call for each of its pieces, which travel at the same time."""
        span, title = self._spans.begin(kind, "collective"), self._begin(kind, size_bytes)
        works = self._call(title, lambda: [collective(*piece) for piece in pieces])

        def wait() -> None:
            before_s = time.perf_counter()
            self._call(title, lambda: [work.wait() for work in works])
            self.waited_s += time.perf_counter() - before_s
            self._spans.end(span)

        return wait

    def _begin(self, kind: str, size_bytes: int) -> str:
        """Count a collective, and return its title for messages."""
        self.count(Traffic(1, crc32(f"{kind} {size_bytes}".encode())))
        return f"{kind} {self._counted.collectives}"

    def _call(self, title: str, call: Callable, *arguments):
        self._current = title
        try:
            return call(*arguments)
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            raise PeerLostError(f"{title} over ranks {self.ranks}: {error}") from error
        finally:
            self._current = ""

    def _named(self, current: str) -> str:
        return current and f"{current} over ranks {self.ranks}"


class SharedMemoryRankGroup(RankGroup):
    """A group whose ranks share memory. Each rank reads from the memory of the others, and merges while it reads.

    Raises CollectivesDifferError if ranks run different collectives at the same time. The native channel counts the
    collectives.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, handle: dist.ProcessGroup, spans: Spans = UNTRACED) -> None:
        super().__init__(ranks, rank, handle, spans)
        self.sums_in_rank_order, self.overlaps = True, False
        self._channel = handle.channel

    @property
    def traffic(self) -> Traffic:
        count, _ = self._channel.progress()
        return self._counted.then(Traffic(count, self._channel.fingerprint, self._channel.exchanged_bytes))

    @property
    def exchanged_bytes(self) -> int:
        return self._counted.exchanged_bytes + self._channel.exchanged_bytes

    def progress(self) -> tuple[int, str]:
        count, current = self._channel.progress()
        return count, self._named(current)

    @_in_graphs(RankGroup.all_reduce)
    def all_reduce(self, values: Tensor) -> Tensor:
        span = self._spans.begin("all-reduce", "collective")
        self._channel.all_reduce(values.data_ptr(), values.numel(), native.NUMBER_BY_DTYPE[values.dtype])
        self._spans.end(span)
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        # On one host, a gather costs as much as an all-gather.
        values, whole = values.contiguous(), values.new_empty(self.size, *values.shape)
        span = self._spans.begin("gather", "collective")
        self._channel.all_gather(values.data_ptr(), whole.data_ptr(), values.nbytes)
        self._spans.end(span)
        return list(whole) if self.index == 0 else []

    def broadcast(self, values: Tensor, root: int = 0) -> Tensor:
        span = self._spans.begin("broadcast", "collective")
        self._channel.broadcast(values.data_ptr(), values.nbytes, root)
        self._spans.end(span)
        return values

    @_in_graphs(RankGroup.all_reduce_add)
    def all_reduce_add(self, values: Tensor, residual: Tensor) -> Tensor:
        total = torch.empty_like(values)
        span = self._spans.begin("all-reduce", "collective")
        addresses = (values.data_ptr(), residual.data_ptr(), total.data_ptr())
        self._channel.all_reduce_add(*addresses, values.numel(), native.NUMBER_BY_DTYPE[values.dtype])
        self._spans.end(span)
        return total

    @_in_graphs(RankGroup.merges)  # graphs have the exchange and the merge as separate ops
    def merges(self, head_size: int) -> bool:
        return head_size <= native.LONGEST_HEAD

    def exchange_states(
        self, out_tqC: Tensor, lse_tq: Tensor, heads_per_rank: list[int], places_NT: Tensor | None
    ) -> Tensor:
        """Exchange and merge in one call, if `merges` returns True. places_NT: as in `holders.Holding`."""
        rows, _, head_size = out_tqC.shape
        rows = rows if places_NT is None else places_NT.shape[1]
        merged_TnC = out_tqC.new_empty(rows, heads_per_rank[self.index], head_size)
        span = self._spans.begin("exchange", "exchange")
        self._channel.exchange(
            out_tqC.data_ptr(),
            lse_tq.data_ptr(),
            rows,
            0 if places_NT is None else places_NT.data_ptr(),
            heads_per_rank,
            head_size,
            native.NUMBER_BY_DTYPE[out_tqC.dtype],
            merged_TnC.data_ptr(),
        )
        self._spans.end(span)
        return merged_TnC

    def _begin(self, kind: str, size_bytes: int) -> str:
        return kind


class HostsRankGroup(RankGroup):
    """A group whose ranks are on several hosts. Ranks of one host share memory."""

    def __init__(self, ranks: tuple[int, ...], rank: int, handle: dist.ProcessGroup, spans: Spans = UNTRACED) -> None:
        super().__init__(ranks, rank, handle, spans)
        self.sums_in_rank_order = True

    @property
    def network_bytes(self) -> int:
        return self._handle.network_bytes

    def _send_to_all(self, *arguments) -> dist.Work:
        return self._handle.start_all_to_all(*arguments)


_KINDS: dict[str | None, type[RankGroup]] = {"shm": SharedMemoryRankGroup, "hosts": HostsRankGroup}


def group_of(
    ranks: tuple[int, ...], rank: int, handle: dist.ProcessGroup | None, backend: str | None, spans: Spans
) -> RankGroup:
    """Return the group over a handle of torch with this backend. Without a handle, a group of one rank."""
    kind = RankGroup if handle is None else _KINDS.get(backend, RankGroup)
    return kind(ranks, rank, handle, spans)
