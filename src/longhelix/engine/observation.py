"""What an engine does now: for metrics, and for whoever looks at it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from longhelix.scheduler.recording import Completed, Event, Scheduled
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.sequence import Sequence
from longhelix.scheduler.step import Chunk, Step
from longhelix.scheduler.work import Work

_MOST_KEPT = 4096  # steps that nobody has taken


@dataclass(frozen=True)
class RanChunk:
    """Tokens of one request's prompt that a step computed."""

    request_id: int
    num_tokens: int


@dataclass(frozen=True)
class ObservedStep:
    """A step that has come back. predicted_s: what it was to take when it was sent, None where no cost says; taken_s:
    what it took. exposed_s: what ranks waited for exchanges in it, None where nobody measured. parts: see `Work`."""

    id: int
    microbatch: int
    decode_rows: int
    chunks: tuple[RanChunk, ...]
    parts: int
    predicted_s: float | None
    taken_s: float
    exposed_s: float | None
    exchanged_bytes: int


@dataclass(frozen=True)
class RunningRequest:
    """A request that has been admitted. placement: by its name. kv_blocks_per_rank: those that it has on each KVP rank,
    shared ones included; cached_tokens: of its prompt, those whose KV was there when it began."""

    id: int
    client: str
    prompt_tokens: int
    prefilled_tokens: int
    new_tokens: int
    cached_tokens: int
    preemptions: int
    placement: str
    kv_blocks_per_rank: tuple[int, ...]


@dataclass(frozen=True)
class RankBlocks:
    """The KV blocks of a KVP rank's pool. held: by requests or saved contexts; cached: held by nobody, with what they
    had still there; promised: neither, but not to be had by others."""

    total: int
    held: int
    cached: int
    promised: int


@dataclass(frozen=True)
class Observation:
    """The engine between two steps. ranks: KVP ranks."""

    running: tuple[RunningRequest, ...]
    num_waiting: int
    block_tokens: int
    ranks: tuple[RankBlocks, ...]


def observe(scheduler: Scheduler) -> Observation:
    """Look at all requests that run: more than a step should pay for."""
    return Observation(
        running=tuple(map(_running, scheduler.running)),
        num_waiting=scheduler.num_waiting,
        block_tokens=scheduler.config.block_tokens,
        ranks=tuple(
            RankBlocks(each.num_blocks, each.num_held, each.num_cached, each.reserved)
            for each in scheduler.pool.allocators
        ),
    )


def _running(seq: Sequence) -> RunningRequest:
    request, job = seq.request, seq.job
    return RunningRequest(
        id=seq.id,
        client=request.service.client,
        prompt_tokens=request.given_tokens,
        prefilled_tokens=min(seq.length, request.given_tokens),
        new_tokens=request.num_generated + len(seq.output),
        cached_tokens=job.cached_tokens,
        preemptions=job.preemptions,
        placement=seq.placement.name,
        kv_blocks_per_rank=tuple(map(len, seq.block_ids)),
    )


class StepLog:
    """The steps that have come back and that nobody has taken yet, as a loop tells them."""

    def __init__(self, predict: Callable[[Work], float | None]) -> None:
        self._predict = predict
        self._sent: dict[int, tuple[Step, float | None]] = {}
        self._ran: deque[ObservedStep] = deque(maxlen=_MOST_KEPT)

    def hear(self, event: Event) -> None:
        match event:
            case Scheduled(_, Step() as step):
                self._sent[step.id] = step, self._predict(step.work)
            case Completed(result):
                step, predicted_s = self._sent.pop(result.step_id)
                self._ran.append(
                    ObservedStep(
                        id=step.id,
                        microbatch=step.microbatch,
                        decode_rows=int(step.work.decode_rows),
                        chunks=tuple(map(_ran_chunk, step.chunks)),
                        parts=int(step.work.parts),
                        predicted_s=predicted_s,
                        taken_s=result.taken_s,
                        exposed_s=result.exposed_s,
                        exchanged_bytes=result.exchanged_bytes,
                    )
                )

    def take(self) -> list[ObservedStep]:
        """Those since the last call, the last few thousand of them."""
        ran = list(self._ran)
        self._ran.clear()
        return ran


def _ran_chunk(chunk: Chunk) -> RanChunk:
    return RanChunk(chunk.id, chunk.num_tokens)
