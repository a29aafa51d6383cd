"""The collectives of a group of ranks. They are counted, and so are the bytes that they send."""

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
    """Whether this error of gloo or NCCL means that a peer is gone, not that a call was wrong."""
    said = str(error)
    # An interface that cannot be found is this rank's own trouble.
    return isinstance(error, dist.DistError) or ("gloo/transport" in said and "/device.cc" not in said)


def _in_graphs(form: Callable) -> Callable[[Callable], Callable]:
    """The decorated method, with `form` in its place inside of compiled graphs. A compiled engine also runs some steps
    op by op, so both are called."""

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
    """The sum of equal shapes. 16-bit formats are added in float32 and rounded once."""
    dtype = parts[0].dtype
    total = parts[0].float() if dtype in (torch.bfloat16, torch.float16) else parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(dtype)


def _pieces(values: Tensor) -> list[slice]:
    """Rows of what goes to each rank, as gloo sends them both ways at once."""
    count = max(min(values.nbytes // _PIECE_BYTES, len(values), _MOST_PIECES), 1)
    return [slice(part.start, part.stop) for part in split(len(values), count)]


class RankGroup:
    """A group of ranks, as one of them sees it. A group of one rank does nothing and sends nothing.

    ranks: in the order of the group. A peer that is gone raises PeerLostError. `traffic` must be the same on all ranks,
    except for its bytes. `spans` are told of all collectives outside of compiled graphs.
    """

    def __init__(
        self, ranks: tuple[int, ...], rank: int, handle: dist.ProcessGroup | None, spans: Spans = UNTRACED
    ) -> None:
        self.ranks = ranks
        self.size = len(ranks)
        self.index = ranks.index(rank)
        # Sums are the same bits whatever the size of the message; gloo's are not, from three ranks on.
        self.sums_in_rank_order = self.size == 1
        # Gloo's reduce-scatter sends as much as its all-reduce, and large messages one direction after the other.
        self.is_gloo = self.size > 1 and isinstance(handle, dist.ProcessGroup) and handle.name() == "gloo"
        self.overlaps = self.size > 1  # what is sent travels while this rank computes
        self.waited_s = 0.0  # for what was started to be exchanged; on GPUs streams wait, and here next to nothing
        self._handle = handle
        self._spans = spans
        self._own = Traffic()  # what was counted here
        self._current = ""

    @property
    def traffic(self) -> Traffic:
        """All collectives so far. Those that compiled graphs run over gloo or NCCL are not counted."""
        return self._own

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Torch's own, as compiled graphs name it; None for a rank alone."""
        return self._handle

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that this rank has given to the transport for other ranks, in `all_to_all` and `exchange_states`."""
        return self.traffic.exchanged_bytes

    @property
    def network_bytes(self) -> int:
        """Bytes that this rank has sent to ranks of other hosts.

        Always 0 if all ranks of the group are on one host, or if gloo or NCCL carries the group's collectives.
        """
        return 0

    def count(self, traffic: Traffic) -> None:
        """Add the collectives of a CUDA graph, which made no call here."""
        self._own = self._own.then(traffic)

    def progress(self) -> tuple[int, str]:
        """How many collectives have begun, and the one that runs now, in words, or "". Any thread may ask."""
        return self._own.collectives, self._named(self._current)

    @_in_graphs(_functional_all_reduce)
    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over the group, in place; in a compiled graph, as a new tensor."""
        if self.size > 1:
            self._run("all-reduce", values.nbytes, self._handle.allreduce, [values])
        return values

    def all_reduce_add(self, values: Tensor, residual: Tensor) -> Tensor:
        """residual + the sum of `values` over the group. May overwrite `values`."""
        return residual + self.all_reduce(values)

    def all_gather(self, values: Tensor) -> Tensor:
        """The rows of all ranks in their order, (n L, ...), of this rank's (L, ...)."""
        return self.start_all_gather(values)()

    @_in_graphs(_functional_all_gather)
    def start_all_gather(self, values: Tensor) -> Callable[[], Tensor]:
        """Begin an `all_gather`. Call what it returns to wait for the result."""
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
        """This rank's rows (L, ...) of the sum over the group of (n L, ...)."""
        return self.start_reduce_scatter(values)()

    @_in_graphs(_functional_reduce_scatter)
    def start_reduce_scatter(self, values: Tensor) -> Callable[[], Tensor]:
        """Begin a `reduce_scatter`. Call what it returns to wait for the result."""
        if self.size == 1:
            return lambda: values
        parts = values.contiguous().view(self.size, len(values) // self.size, *values.shape[1:])
        if not self.is_gloo:
            own = torch.empty_like(parts[0])
            wait = self._start("reduce-scatter", values.nbytes, self._handle._reduce_scatter_base, (own, parts))
        else:
            given = [parts[:, rows].flatten(0, 1).contiguous() for rows in _pieces(parts[0])]
            received = [torch.empty_like(each) for each in given]
            sizes = [[len(each) // self.size] * self.size for each in given]
            pieces = zip(received, given, sizes, sizes, strict=True)
            wait = self._start("reduce-scatter", values.nbytes, self._handle.alltoall_base, *pieces)

        def finish() -> Tensor:
            wait()
            return torch.cat([sum_in_order(each.chunk(self.size)) for each in received]) if self.is_gloo else own

        return finish

    def merges(self, head_size: int) -> bool:
        """Whether `exchange_states` does the exchange and the merge as one call."""
        return False

    def all_to_all(self, send: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> Tensor:
        """Send consecutive pieces of a flat tensor to the ranks of the group. Returns what came from them, in their
        order."""
        return self.start_all_to_all(send, send_sizes, receive_sizes)()

    @_in_graphs(_functional_all_to_all)
    def start_all_to_all(self, send: Tensor, send_sizes: list[int], receive_sizes: list[int]) -> Callable[[], Tensor]:
        """Begin an `all_to_all`. Call what it returns to wait for the result."""
        # Sizes differ by rank, and are not counted.
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
        """Equal shapes from every rank, in order, on the group's first rank; an empty list on the others."""
        if self.size == 1:
            return [values]
        gathered = [torch.empty_like(values) for _ in self.ranks] if self.index == 0 else []
        receivers = [gathered] if gathered else []
        self._run("gather", values.nbytes, self._handle.gather, receivers, [values.contiguous()], dist.GatherOptions())
        return gathered

    def broadcast(self, values: Tensor, root: int = 0) -> Tensor:
        """Overwrite `values` on all ranks by those of the rank with index `root`."""
        if self.size > 1:
            options = dist.BroadcastOptions()
            options.rootRank = root
            self._run("broadcast", values.nbytes, self._handle.broadcast, [values], options)
        return values

    def _run(self, kind: str, size_bytes: int, collective: Callable, *arguments) -> None:
        # The process group itself and not torch.distributed's functions, which add 5 us of checks to each call.
        span = self._spans.begin(kind, "collective")
        self._call(self._begin(kind, size_bytes), lambda: collective(*arguments).wait())
        self._spans.end(span)

    def _start(self, kind: str, size_bytes: int, collective: Callable, *pieces: tuple[Any, ...]) -> Callable[[], None]:
        """Begin one collective, by a call for each of its pieces, which travel beside each other."""
        span, title = self._spans.begin(kind, "collective"), self._begin(kind, size_bytes)
        works = self._call(title, lambda: [collective(*piece) for piece in pieces])

        def wait() -> None:
            before_s = time.perf_counter()
            self._call(title, lambda: [work.wait() for work in works])
            self.waited_s += time.perf_counter() - before_s
            self._spans.end(span)

        return wait

    def _begin(self, kind: str, size_bytes: int) -> str:
        """Count a collective, and return its name in words."""
        self.count(Traffic(1, crc32(f"{kind} {size_bytes}".encode())))
        return f"{kind} {self._own.collectives}"

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
    """A group whose ranks share memory: each reads what it needs from the others' memory, and merges as it reads.

    Ranks that are in different collectives of one group notice it, and raise CollectivesDifferError. The native channel
    counts the collectives.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, handle: dist.ProcessGroup, spans: Spans = UNTRACED) -> None:
        super().__init__(ranks, rank, handle, spans)
        self.sums_in_rank_order, self.overlaps = True, False
        self._channel = handle.channel

    @property
    def traffic(self) -> Traffic:
        begun, _ = self._channel.progress()
        return self._own.then(Traffic(begun, self._channel.fingerprint, self._channel.exchanged_bytes))

    @property
    def exchanged_bytes(self) -> int:
        return self._own.exchanged_bytes + self._channel.exchanged_bytes

    def progress(self) -> tuple[int, str]:
        begun, current = self._channel.progress()
        return begun, self._named(current)

    @_in_graphs(RankGroup.all_reduce)
    def all_reduce(self, values: Tensor) -> Tensor:
        span = self._spans.begin("all-reduce", "collective")
        self._channel.all_reduce(values.data_ptr(), values.numel(), native.NUMBER_BY_DTYPE[values.dtype])
        self._spans.end(span)
        return values

    def gather(self, values: Tensor) -> list[Tensor]:
        # On one host a gather costs what an all-gather costs.
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

    @_in_graphs(RankGroup.merges)  # there the exchange and the merge are seen apart
    def merges(self, head_size: int) -> bool:
        return head_size <= native.LONGEST_HEAD

    def exchange_states(
        self, out_tqC: Tensor, lse_tq: Tensor, heads_per_rank: list[int], places_NT: Tensor | None
    ) -> Tensor:
        """The exchange and the merge as one call, where `merges` is true. `places_NT`: as in `holders.Holding`."""
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
    """A group whose ranks are on several hosts. Those of one host share memory."""

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
    """The group over a handle of torch's, of that backend; without a handle one rank alone."""
    kind = RankGroup if handle is None else _KINDS.get(backend, RankGroup)
    return kind(ranks, rank, handle, spans)
