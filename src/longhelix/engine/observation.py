"""Snapshots of a running engine and records of its steps, for metrics and the live page."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from longhelix.scheduler.kv.blocks import BlockAllocator
from longhelix.scheduler.recording import Completed, Event, Scheduled
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.sequence import Sequence
from longhelix.scheduler.step import Chunk, Step
from longhelix.scheduler.work import Work

_MOST_KEPT = 4096  # finished steps that wait for `take`


@dataclass(frozen=True)
class RanChunk:
    """The part of one request's prompt that a step computed."""

    request_id: int
    num_tokens: int


@dataclass(frozen=True)
class ObservedStep:
    """A finished step."""

    id: int
    microbatch: int
    decode_rows: int  # rows of decoding requests, with those of draft tokens
    chunks: tuple[RanChunk, ...]
    parts: int  # see `Work`
    predicted_s: float | None  # predicted duration when the step was sent; None without a cost model
    taken_s: float  # measured duration
    exposed_s: float | None  # how long ranks waited for exchanges; None if this time was not measured
    exchanged_bytes: int
    network_bytes: int = 0  # bytes sent between hosts


@dataclass(frozen=True)
class RunningRequest:
    """A request that has been admitted."""

    id: int
    client: str
    prompt_tokens: int
    prefilled_tokens: int
    new_tokens: int
    cached_tokens: int  # prompt tokens whose KV was cached when the request was admitted
    preemptions: int
    placement: str  # name of the placement
    kv_blocks_per_rank: tuple[int, ...]  # number of blocks on each KVP rank, including shared blocks


@dataclass(frozen=True)
class RankBlocks:
    """How the KV blocks of one KVP rank's pool are used."""

    total: int
    held: int  # blocks that requests or saved contexts hold
    cached: int  # blocks in the prefix cache that are not held and can be evicted
    promised: int  # blocks that are reserved for admitted requests but not held yet


@dataclass(frozen=True)
class WindowPools:
    """How the KV blocks of layers with a limit are used, which have pools of their own."""

    window_tokens: int | None  # a row sees so many tokens; None if it sees those of its chunk
    chunk_tokens: int | None
    ranks: tuple[RankBlocks, ...]  # one entry for each KVP rank


@dataclass(frozen=True)
class Observation:
    """The state of the engine between two steps."""

    running: tuple[RunningRequest, ...]
    num_waiting: int
    block_tokens: int
    ranks: tuple[RankBlocks, ...]  # one entry for each KVP rank, of layers without a limit
    windows: tuple[WindowPools, ...] = ()  # one entry for each kind of layers with a limit

    def usage(self, *, all_limited: bool) -> float:
        """Return the fraction of KV blocks that requests or saved contexts hold, of the fullest KV group.

        Args:
            all_limited: whether all layers have a limit, so that the blocks of others take no memory.
        """
        of_windows = [window.ranks for window in self.windows]
        of_groups = of_windows if all_limited else [self.ranks, *of_windows]
        return max(sum(rank.held for rank in ranks) / sum(rank.total for rank in ranks) for ranks in of_groups)


def observe(scheduler: Scheduler) -> Observation:
    """Return the engine's current state. This function reads every running request, so do not call it in every step."""
    return Observation(
        running=tuple(map(_running, scheduler.running)),
        num_waiting=scheduler.num_waiting,
        block_tokens=scheduler.config.block_tokens,
        ranks=tuple(map(_blocks, scheduler.pool.allocators)),
        windows=tuple(
            WindowPools(
                window_tokens=window.visibility.window_tokens,
                chunk_tokens=window.visibility.chunk_tokens,
                ranks=tuple(map(_blocks, window.allocators)),
            )
            for window in scheduler.pool.windows
        ),
    )


def _blocks(allocator: BlockAllocator) -> RankBlocks:
    return RankBlocks(allocator.num_blocks, allocator.num_held, allocator.num_cached, allocator.reserved)


def _running(seq: Sequence) -> RunningRequest:
    request, job = seq.request, seq.job
    return RunningRequest(
        id=seq.id,
        client=request.service.client,
        prompt_tokens=request.given_tokens,
        prefilled_tokens=min(seq.length, request.given_tokens),
        new_tokens=request.num_generated + len(seq.tokens.output),
        cached_tokens=job.history.cached_tokens,
        preemptions=job.history.preemptions,
        placement=seq.kv.placement.name,
        kv_blocks_per_rank=tuple(map(len, seq.kv.block_ids)),
    )


class StepLog:
    """Collects finished steps from the events of a loop until `take` is called."""

    def __init__(self, predict: Callable[[Work], float | None]) -> None:
        self._predict = predict
        self._sent: dict[int, tuple[Step, float | None]] = {}
        self._ran: deque[ObservedStep] = deque(maxlen=_MOST_KEPT)

    def on_event(self, event: Event) -> None:
        """Record a step that was sent or that finished."""
        match event:
            case Scheduled(_, Step() as step):
                self._sent[step.id] = step, self._predict(step.work)
            case Completed(result):
                step, predicted_s = self._sent.pop(result.step_id)
                self._ran.append(
                    ObservedStep(
                        id=step.id,
                        microbatch=step.turn.microbatch,
                        decode_rows=int(step.work.decode_rows) + sum(draft.num_tokens for draft in step.drafts),
                        chunks=tuple(map(_ran_chunk, step.chunks)),
                        parts=int(step.work.parts),
                        predicted_s=predicted_s,
                        taken_s=result.measured.taken_s,
                        exposed_s=result.measured.exposed_s,
                        exchanged_bytes=result.measured.exchanged_bytes,
                        network_bytes=result.measured.network_bytes,
                    )
                )

    def take(self) -> list[ObservedStep]:
        """Return the steps that have finished since the last call. Only the last few thousand steps are kept."""
        ran = list(self._ran)
        self._ran.clear()
        return ran


def _ran_chunk(chunk: Chunk) -> RanChunk:
    return RanChunk(chunk.id, chunk.num_tokens)
