"""All ranks as one runner for the loop: they get its steps, report results, and end together."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import TypeVar

import msgspec
import zmq

from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.execution import Execution
from longhelix.compute.runner.trace import TraceEvent
from longhelix.engine.workers import torchrun
from longhelix.engine.workers.ranks import Ranks, await_prepared
from longhelix.engine.workers.step_cost import step_cost
from longhelix.engine.workers.transport import (
    Alive,
    Carried,
    CountRows,
    Done,
    EngineSocket,
    Execute,
    Failed,
    Joined,
    LoadBlocks,
    Loaded,
    PassReport,
    Ready,
    ReportPasses,
    RowCounts,
    SaveBlocks,
    Start,
    Stop,
    TakeImageRows,
    TakeTokens,
    ToEngine,
    ToWorker,
    Traced,
    Warmed,
)
from longhelix.engine.workers.watchdog import DISK_S, GRACE_S, Watchdog
from longhelix.errors import EngineError, UserError
from longhelix.scheduler.cut import Cut
from longhelix.scheduler.step import Step, StepResult
from longhelix.spec.layout import Layout

# A stopped or wedged process misses several heartbeats in a row; a busy one does not. While it loads, importing
# or reading may hold its interpreter, and the heart with it, for longer.
SILENCE_S = 5.0
_LOADING_SILENCE_S = 120.0
_POLL_S, _LOOK_S = 0.1, 0.5
_STOP_S = 3.0

_Answer = TypeVar("_Answer")


class WorkerPool:
    """N worker processes, one per rank, as a Runner. If one rank ends, all end, with an EngineError.

    cost: the cost of its steps. cut: chooses in how many parts steps attend; None where parts have no use.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_loaded: Callable[[int], None],
        on_warmed: Callable[[float], None],
        on_traced: Callable[[int, list[TraceEvent]], None],
    ) -> None:
        """Start all ranks and wait until they take steps. `on_loaded` is called with elements of weights as they are
        loaded, `on_warmed` with the share of the first rank's warm-up that is done, if there is one, `on_traced` with a
        rank and its events of one step, where steps are traced."""
        self._ranks = range(config.layout.world_size)
        self._watchdog = Watchdog(config)
        self._layout = config.layout
        self._in_flight: dict[int, _InFlight] = {}
        # Quiet time counts while the engine listens, and at most a little between two times that it does: a suspended
        # engine blames nobody, and one that only looks now and then sees who is silent.
        self._listened_at = time.monotonic()
        self._quiet_s = dict.fromkeys(self._ranks, 0.0)
        # A rank gives no signs before it has joined; a start that stands still is the watchdog's.
        self._patience_s = dict.fromkeys(self._ranks, math.inf)
        self._consequences: dict[int, str] = {}
        self._checked_at = 0.0
        self._closed = False
        self._on_traced = on_traced
        await_prepared()
        # torchrun has started the ranks but for the first, whose process it uses for the engine.
        self._processes = Ranks(torchrun.make_directory() if torchrun.is_active() else None)
        try:
            self._socket = EngineSocket(self._processes.directory)
        except BaseException:
            self._processes.close()
            raise
        try:
            self._processes.start("longhelix.engine.workers.worker", [0] if torchrun.is_active() else self._ranks)
            executions = self._await_ready(config, on_loaded, on_warmed)
        except BaseException:
            self.close(grace_s=0)
            raise
        self.cost = step_cost(config, overlaps=all(rank.overlaps for rank in executions))
        self.cut = Cut(self.cost, config.hop_b) if all(rank.parts for rank in executions) else None
        packed, compiles = all(rank.packed for rank in executions), any(rank.compiles for rank in executions)
        self._watchdog.ready(self.cost, packed, compiles)

    @property
    def process_ids(self) -> dict[int, int]:
        """Rank to process id, of the processes that this pool started."""
        return self._processes.process_ids

    @property
    def still_s(self) -> float:
        """For how long no rank has got on, while steps are in flight. From any thread."""
        return self._watchdog.still_s if self._in_flight else 0.0

    def submit(self, step: Step) -> None:
        """Give a step to its ranks. If it cannot be sent, the engine ends, because the step is lost."""
        self._check_open()
        in_flight = _InFlight(_stages(self._layout, step))
        try:
            self._socket.send(in_flight.ranks, Execute(step))
        except Exception as error:
            self.close(grace_s=0)
            raise EngineError(f"step {step.id} cannot be sent: {type(error).__name__}: {error}") from error
        self._in_flight[step.id] = in_flight
        self._watchdog.submitted(step.id, step.work)
        self._watchdog.given(in_flight.ranks)

    def collect(self, timeout_s: float = math.inf) -> StepResult | None:
        """The result of the first step that all of its ranks have done, or None if that takes longer than `timeout_s`.
        Raises EngineError, and closes, if a rank fails."""
        self._check_open()
        deadline_s = time.monotonic() + timeout_s
        try:
            while (step_id := _first_done(self._in_flight)) is None:
                received = self._receive(deadline_s)
                self._check_progress()
                if received is None:
                    return None
                self._take(*received)
            result = self._in_flight[step_id].result()
        except BaseException:
            self.close(grace_s=0)
            raise
        self._watchdog.finished(step_id)
        del self._in_flight[step_id]
        return result

    def _check_progress(self) -> None:
        """Have the watchdog look at the steps that ranks are in."""
        for step_id, step in _foremost(self._in_flight):
            self._watchdog.check(step_id, step.ranks, set(step.results))

    def expert_rows(self, ranks: Collection[int]) -> list[list[list[int]]]:
        """The rows that each expert of each of `ranks` has had so far, by rank and layer."""
        self._check_open()
        counted = self._ask(ranks, CountRows(), RowCounts, GRACE_S)
        return [counted[rank].rows for rank in ranks]

    def pass_reports(self) -> list[PassReport]:
        """What the sequence-parallel pass has made of the graphs of each stage, whose ranks have them alike."""
        self._check_open()
        leaders = [ranks[0] for ranks in self._layout.stage_groups()]
        return list(self._ask(leaders, ReportPasses(), PassReport, GRACE_S).values())

    def carry(self, message: SaveBlocks | LoadBlocks) -> UserError | None:
        """Have all ranks save or load KV blocks, between two steps. Returns what one of them says, if that cannot
        be."""
        self._check_open()
        answers = self._ask(self._ranks, message, Carried, DISK_S).values()
        return next((UserError(answer.refusal, answer.code) for answer in answers if answer.refusal), None)

    def show(self, ranks: Collection[int], message: TakeImageRows | TakeTokens) -> None:
        """Send ranks data for the next step: image rows, or the token table of guides."""
        self._check_open()
        self._socket.send(ranks, message)
        self._watchdog.given(ranks)

    def _ask(
        self, ranks: Collection[int], message: ToWorker, kind: type[_Answer], patience_s: float
    ) -> dict[int, _Answer]:
        """What ranks answer to a message, with no step waiting for it. Ends the engine if one of them does not, for so
        long."""
        self._socket.send(ranks, message)
        self._watchdog.given(ranks)
        answers: dict[int, _Answer] = {}
        try:
            while len(answers) < len(ranks):
                rank, received = self._receive()
                if isinstance(received, kind):
                    answers[rank] = received
                else:
                    self._take(rank, received)
                self._watchdog.check_answer(set(ranks) - answers.keys(), patience_s)
        except BaseException:
            self.close(grace_s=0)
            raise
        return answers

    def _take(self, rank: int, message: ToEngine) -> None:
        """Keep what a rank reports of its steps."""
        match message:
            case Done(result):
                self._in_flight[result.step_id].results[rank] = result
            case Traced(events):
                self._on_traced(rank, events)

    def close(self, grace_s: float = _STOP_S) -> None:
        """End every process that this pool started, and remove its sockets, even if the wait for them is interrupted.
        Does nothing once that is done."""
        try:
            if not self._closed:
                self._closed = True
                self._stop(grace_s)
        finally:
            self._processes.kill()
            self._socket.close()
            self._processes.close()

    def _stop(self, grace_s: float) -> None:
        """Ask the ranks to end themselves, and give them some time."""
        try:
            self._socket.send(self._ranks, Stop())
        except zmq.ZMQError:  # they are ended all the same
            return
        self._processes.wait(grace_s)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine has ended: make a new one")

    def _await_ready(
        self, config: EngineConfig, on_loaded: Callable[[int], None], on_warmed: Callable[[float], None]
    ) -> list[Execution]:
        """Wait until all ranks take steps. Returns how each of them runs its layers."""
        ready: dict[int, Execution] = {}
        while len(ready) < len(self._ranks):
            rank, message = self._receive()
            self._watchdog.check_start(set(ready))
            match message:
                case Joined():
                    self._patience_s[rank] = _LOADING_SILENCE_S
                    self._socket.send(range(rank, rank + 1), Start(config))
                case Loaded(elements):
                    on_loaded(elements)
                case Warmed(share) if rank == 0:
                    on_warmed(share)
                case Ready(execution):
                    ready[rank] = execution
                    self._patience_s[rank] = SILENCE_S
        return list(ready.values())

    def _receive(self, deadline_s: float = math.inf) -> tuple[int, ToEngine] | None:
        """The next message, or None at `deadline_s`. Raises an error that names the first rank that failed, and why."""
        while True:
            received = self._socket.receive(min(max(deadline_s - time.monotonic(), 0.0), _POLL_S))
            now = time.monotonic()
            waited_s = min(now - self._listened_at, _LOOK_S)
            self._listened_at = now
            self._watchdog.waited(waited_s)
            for rank in self._ranks:
                self._quiet_s[rank] += waited_s
            # By time, because the signs of life of many ranks leave no gap between them.
            if now - self._checked_at >= _POLL_S:
                self._check_processes()
                self._checked_at = now
            if received is None:
                if now >= deadline_s:
                    return None
                continue
            rank, message = received
            self._quiet_s[rank] = 0.0
            match message:
                case Alive(progress):
                    self._watchdog.heard(rank, progress)
                case _:
                    self._watchdog.got_on(rank)
            if not isinstance(message, Failed):
                return rank, message
            if message.user_error_code:
                raise UserError(message.cause, message.user_error_code)
            if not message.lost_peer:
                self._processes.check_signals()  # whose end its error may follow from
                raise EngineError(f"rank {rank} failed: {message.cause}")
            # The rank that went first says so itself, or shows as a dead or silent process; wait for that.
            self._consequences[rank] = message.cause

    def _check_processes(self) -> None:
        self._processes.check_signals()
        for rank, status in self._processes.statuses().items():
            if rank not in self._consequences and self._quiet_s[rank] > 1.0:
                raise EngineError(f"{self._processes.describe(rank)} ended with status {status}")
        for rank in self._ranks:
            if self._quiet_s[rank] > self._patience_s[rank] and rank not in self._consequences:
                raise EngineError(
                    f"rank {rank} has not answered for {self._patience_s[rank]:.0f} s: it is stopped or wedged"
                )
        for rank, cause in self._consequences.items():
            if self._quiet_s[rank] > 2 * SILENCE_S:
                raise EngineError(f"rank {rank} failed: {cause}")


@dataclass
class _InFlight:
    """A step, and what its ranks have made of it. stages: of each pipeline stage the ranks, in groups that run the same
    collectives; in the last stage the first rank of each returns tokens."""

    stages: Sequence[Sequence[Sequence[int]]]
    results: dict[int, StepResult] = field(default_factory=dict)

    @cached_property
    def ranks(self) -> list[int]:
        return [rank for groups in self.stages for ranks in groups for rank in ranks]

    @property
    def is_done(self) -> bool:
        return len(self.results) == len(self.ranks)

    def result(self) -> StepResult:
        """That of all ranks. Raises EngineError if ranks of a group have run different collectives."""
        for ranks in chain.from_iterable(self.stages):
            _check_same_collectives([self.results[rank] for rank in ranks], ranks)
        exposed_s = [result.exposed_s for result in self.results.values()]
        first, *others = (self.results[ranks[0]] for ranks in self.stages[-1])
        return msgspec.structs.replace(
            first,
            sampled=sum((other.sampled for other in others), first.sampled),
            prompt_logprobs=sum((other.prompt_logprobs for other in others), first.prompt_logprobs),
            num_tokens=sum((other.num_tokens for other in others), first.num_tokens),
            exchanged_bytes=sum(result.exchanged_bytes for result in self.results.values()),
            exposed_s=None if None in exposed_s else max(exposed_s),
            taken_s=sum(max(self.results[rank].taken_s for rank in chain(*groups)) for groups in self.stages),
            moved_s=max(result.moved_s for result in self.results.values()),
        )


def _foremost(in_flight: Mapping[int, _InFlight]) -> Iterator[tuple[int, _InFlight]]:
    """The steps that no rank of theirs has an earlier one before."""
    behind: set[int] = set()
    for step_id, step in in_flight.items():
        if behind.isdisjoint(step.ranks):
            yield step_id, step
        behind.update(step.ranks)


def _first_done(in_flight: Mapping[int, _InFlight]) -> int | None:
    """The first step that all of its ranks have done. One that others of them are not done with goes before what some
    have done since: its tokens come first."""
    return next((step_id for step_id, step in _foremost(in_flight) if step.is_done), None)


def _stages(layout: Layout, step: Step) -> list[list[tuple[int, ...]]]:
    """The ranks that take a step, as `_InFlight` has them."""
    if not step.instances:
        return [[ranks] for ranks in layout.stage_groups()]
    return [[layout.tpa_groups()[instance] for instance in step.instances]]


def _check_same_collectives(results: Sequence[StepResult], ranks: Sequence[int]) -> None:
    """Raise EngineError if ranks ran other collectives than the first one in a step: they have then computed with wrong
    numbers."""
    first = results[0]
    others = [rank for rank, result in zip(ranks, results, strict=True) if result.fingerprint != first.fingerprint]
    if others:
        raise EngineError(f"in step {first.step_id} ranks {others} ran other collectives than rank {ranks[0]}")
