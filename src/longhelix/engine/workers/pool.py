"""Runs all ranks as one runner for the loop. It sends steps to them, collects their results and ends them together."""

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
from longhelix.engine.hosts.cluster import Cluster
from longhelix.engine.hosts.rank_socket import open_socket
from longhelix.engine.workers import torchrun
from longhelix.engine.workers.ranks import Ranks, await_prepared
from longhelix.engine.workers.step_cost import step_cost
from longhelix.engine.workers.transport import (
    Alive,
    Carried,
    CountRows,
    Done,
    Execute,
    Failed,
    Hosting,
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
from longhelix.scheduler.step import Step, StepMeasurements, StepResult
from longhelix.spec.layout import Layout

# A stopped or hung process misses several heartbeats in a row, but a busy process does not. While a rank loads the
# model, an import or a read may block its interpreter, and so its heartbeat thread, for longer.
SILENCE_S = 5.0
_LOADING_SILENCE_S = 120.0
_BEATS_S = 2.0  # heartbeats of ranks on one host come within this time
_POLL_S, _LOOK_S = 0.1, 0.5
_STOP_S = 3.0

_Answer = TypeVar("_Answer")


class WorkerPool:
    """Runner with one worker process for each rank. If one rank ends, the pool ends all ranks and raises EngineError.

    Attributes:
        cost: predicts the cost of steps.
        cut: chooses into how many parts the attention of a step is split. None if the ranks cannot use parts.
    """

    def __init__(
        self,
        config: EngineConfig,
        on_loaded: Callable[[int], None],
        on_warmed: Callable[[float], None],
        on_traced: Callable[[int, list[TraceEvent]], None],
        cluster: Cluster | None = None,
    ) -> None:
        """Start all ranks and wait until they are ready for steps.

        Args:
            config: the engine's configuration.
            cluster: the other hosts. None if this host runs all ranks.
            on_loaded: called with the number of weight elements that a rank has just loaded.
            on_warmed: called with the completed fraction of the first rank's warm-up, if there is a warm-up.
            on_traced: called with a rank and its trace events of one step, if steps are traced.
        """
        self._ranks = range(config.layout.world_size)
        self._hosts, self._cluster = config.machines.hosts, cluster
        self._watchdog = Watchdog(config)
        self._layout = config.layout
        self._in_flight: dict[int, _InFlight] = {}
        # Between two calls of `_receive`, at most _LOOK_S counts as silence. An engine that was suspended
        # therefore does not report silent ranks, and an engine that calls `_receive` only rarely still finds them.
        self._listened_at = time.monotonic()
        self._quiet_s = dict.fromkeys(self._ranks, 0.0)
        # A rank may be silent for any time before it has joined. The watchdog detects starts that are stuck.
        self._patience_s = dict.fromkeys(self._ranks, math.inf)
        self._consequences: dict[int, str] = {}
        self._checked_at = 0.0
        self._closed = False
        self._closes_hosts = True
        self._on_traced = on_traced
        await_prepared()
        # With torchrun, this process is torchrun's rank 0, which runs the engine. torchrun has started the other ranks,
        # so the pool starts only the worker of rank 0.
        self._processes = Ranks(torchrun.make_directory() if torchrun.is_active() else None)
        try:
            self._socket = open_socket(self._processes.directory, cluster)
        except BaseException:
            self._processes.close()
            raise
        try:
            if cluster is not None:
                cluster.launch(on_wait=lambda: on_loaded(0))
            own = [0] if torchrun.is_active() else config.machines.hosts.ranks[0]
            self._processes.start("longhelix.engine.workers.worker", own)
            executions = self._await_ready(config, on_loaded, on_warmed)
        except BaseException:
            self.close(grace_s=0)
            raise
        self.cost = step_cost(config, overlaps=all(rank.capabilities.overlaps for rank in executions))
        self.cut = Cut(self.cost, config.execution.hop_b) if all(rank.parts for rank in executions) else None
        packed = all(rank.capabilities.packed for rank in executions)
        compiles = any(rank.compiles for rank in executions)
        self._watchdog.ready(self.cost, packed, compiles)

    @property
    def process_ids(self) -> dict[int, int]:
        """The process id of each rank that this pool started."""
        return self._processes.process_ids

    @property
    def still_s(self) -> float:
        """Seconds since any rank last made progress, or 0 if no step is in flight. Any thread may read it."""
        return self._watchdog.still_s if self._in_flight else 0.0

    def submit(self, step: Step) -> None:
        """Send a step to its ranks. If sending fails, the engine ends, because the step is lost."""
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
        """Wait until all ranks of a step have finished the step.

        Returns:
            The result of the step, or None after `timeout_s` seconds.

        Raises:
            EngineError: a rank failed. The pool is closed.
        """
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
        """Have the watchdog check the steps that ranks are running."""
        try:
            for step_id, step in _foremost(self._in_flight):
                self._watchdog.check(step_id, step.ranks, set(step.results))
        except EngineError:
            self._check_processes()  # a rank or a host that is gone is the cause, and its error names it
            raise

    def expert_rows(self, ranks: Collection[int]) -> list[list[list[int]]]:
        """Return the rows that each expert of `ranks` has processed so far, by rank and layer."""
        self._check_open()
        counted = self._ask(ranks, CountRows(), RowCounts, GRACE_S)
        return [counted[rank].rows for rank in ranks]

    def pass_reports(self) -> list[PassReport]:
        """Return the sequence-parallel pass's report of one rank of each stage.

        All ranks of a stage have the same report.
        """
        self._check_open()
        leaders = [ranks[0] for ranks in self._layout.stage_groups()]
        return list(self._ask(leaders, ReportPasses(), PassReport, GRACE_S).values())

    def carry(self, message: SaveBlocks | LoadBlocks) -> UserError | None:
        """Have all ranks save or load KV blocks between two steps.

        Returns:
            The error of the first rank that failed, or None.
        """
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
        """Send a message to ranks and return their answers. Steps do not wait for the answers.

        Raises:
            EngineError: a rank did not answer within `patience_s` seconds. The pool is closed.
        """
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
        """Store what a rank reports about its steps."""
        match message:
            case Done(result):
                self._in_flight[result.step_id].results[rank] = result
            case Traced(events):
                self._on_traced(rank, events)

    def close(self, grace_s: float = _STOP_S) -> None:
        """End every process that this pool started and remove the sockets, even if the wait is interrupted.

        You may call this method more than once.
        """
        try:
            if not self._closed:
                self._closed = True
                self._stop(grace_s)
        finally:
            if self._cluster is not None and self._closes_hosts:
                self._closes_hosts = False
                self._cluster.halt()
            self._processes.kill()
            self._socket.close()
            self._processes.close()

    def _stop(self, grace_s: float) -> None:
        """Ask the ranks to end by themselves and wait up to `grace_s` seconds."""
        try:
            self._socket.send(self._ranks, Stop())
        except zmq.ZMQError:  # `close` kills the ranks in any case
            return
        self._processes.wait(grace_s)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("the engine has ended: make a new one")

    def _await_ready(
        self, config: EngineConfig, on_loaded: Callable[[int], None], on_warmed: Callable[[float], None]
    ) -> list[Execution]:
        """Wait until all ranks are ready for steps. Returns how each rank runs its layers."""
        ready: dict[int, Execution] = {}
        joined: set[int] = set()
        meeting = None if self._cluster is None else self._cluster.meeting
        while len(ready) < len(self._ranks):
            rank, message = self._receive()
            self._watchdog.check_start(set(ready))
            match message:
                case Joined():
                    joined.add(rank)
                    self._patience_s[rank] = _LOADING_SILENCE_S
                    if meeting is None or meeting.port or rank == 0:  # rank 0 finds a port, which the others need
                        self._socket.start([rank], Start(config, meeting))
                case Hosting(port) if meeting is not None:
                    meeting = msgspec.structs.replace(meeting, port=port)
                    self._socket.start(joined - {rank}, Start(config, meeting))
                case Loaded(elements):
                    on_loaded(elements)
                case Warmed(share) if rank == 0:
                    on_warmed(share)
                case Ready(execution):
                    ready[rank] = execution
                    self._patience_s[rank] = SILENCE_S
        return list(ready.values())

    def _receive(self, deadline_s: float = math.inf) -> tuple[int, ToEngine] | None:
        """Return the next message, or None at `deadline_s`.

        Raises:
            EngineError: a rank failed. The error names the first rank that failed, and the reason.
            UserError: a rank failed because of the user's input.
        """
        while True:
            received = self._socket.receive(min(max(deadline_s - time.monotonic(), 0.0), _POLL_S))
            now = time.monotonic()
            waited_s = min(now - self._listened_at, _LOOK_S)
            self._listened_at = now
            self._watchdog.waited(waited_s)
            for rank in self._ranks:
                self._quiet_s[rank] += waited_s
            # Check processes at fixed intervals, because heartbeats of many ranks may arrive without a pause.
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
                    self._watchdog.on_heartbeat(rank, progress)
                case _:
                    self._watchdog.made_progress(rank)
            if not isinstance(message, Failed):
                return rank, message
            if message.user_error_code:
                raise UserError(message.cause, message.user_error_code)
            if not message.lost_peer:
                self._processes.check_signals()  # the rank may have failed because a signal ended another rank
                raise EngineError(f"rank {rank} failed: {message.cause}")
            # This rank lost a peer. Wait until the peer that failed first reports its error, or until the pool finds
            # that this peer has ended or is silent.
            self._consequences[rank] = message.cause

    def _check_processes(self) -> None:
        self._processes.check_signals()
        for rank, status in self._processes.statuses().items():
            if rank not in self._consequences and self._quiet_s[rank] > 1.0:
                raise EngineError(f"{self._processes.describe(rank)} ended with status {status}")
        for rank in self._ranks:
            self._check_silence(rank)
        for rank, cause in self._consequences.items():
            if self._quiet_s[rank] > 2 * SILENCE_S:
                raise EngineError(f"rank {rank} failed: {cause}")

    def _check_silence(self, rank: int) -> None:
        """Raise EngineError if a rank has been silent for too long. Name its host if all of that host's ranks are."""
        limit_s = self._patience_s[rank]
        if self._quiet_s[rank] <= limit_s or rank in self._consequences:
            return
        node = self._hosts.node_of(rank)
        if self._cluster is None or node == 0:
            raise EngineError(f"rank {rank} has not answered for {limit_s:.0f} s: its process is stopped or hung")
        others = self._hosts.ranks[node]
        is_alone = any(self._quiet_s[other] < limit_s - _BEATS_S for other in others)
        what = f"rank {rank} on {self._cluster.describe(node)}" if is_alone else self._cluster.describe(node)
        raise EngineError(
            f"{what} has not answered for {limit_s:.0f} s: it is stopped or hung, or its network was cut off"
        )


@dataclass
class _InFlight:
    """A step in flight and the results that have already arrived."""

    # The ranks of each pipeline stage, in groups that run the same collectives. In the last stage, the first rank of
    # each group returns tokens.
    stages: Sequence[Sequence[Sequence[int]]]
    results: dict[int, StepResult] = field(default_factory=dict)  # by rank

    @cached_property
    def ranks(self) -> list[int]:
        return [rank for groups in self.stages for ranks in groups for rank in ranks]

    @property
    def is_done(self) -> bool:
        return len(self.results) == len(self.ranks)

    def result(self) -> StepResult:
        """Combine the results of all ranks. Raises EngineError if ranks of a group ran different collectives."""
        for ranks in chain.from_iterable(self.stages):
            _check_same_collectives([self.results[rank] for rank in ranks], ranks)
        first, *others = (self.results[ranks[0]] for ranks in self.stages[-1])
        return msgspec.structs.replace(
            first,
            sampled=sum((other.sampled for other in others), first.sampled),
            prompt_logprobs=sum((other.prompt_logprobs for other in others), first.prompt_logprobs),
            num_tokens=sum((other.num_tokens for other in others), first.num_tokens),
            measured=self._measured(first.measured),
        )

    def _measured(self, first: StepMeasurements) -> StepMeasurements:
        """Combine the measurements of all ranks. `first` are those of one rank."""
        each = {rank: result.measured for rank, result in self.results.items()}
        exposed_s = [one.exposed_s for one in each.values()]
        return msgspec.structs.replace(
            first,
            taken_s=sum(max(each[rank].taken_s for rank in chain(*groups)) for groups in self.stages),
            moved_s=max(one.moved_s for one in each.values()),
            exposed_s=None if None in exposed_s else max(exposed_s),
            exchanged_bytes=sum(one.exchanged_bytes for one in each.values()),
            network_bytes=sum(one.network_bytes for one in each.values()),
        )


def _foremost(in_flight: Mapping[int, _InFlight]) -> Iterator[tuple[int, _InFlight]]:
    """Yield each step that is the earliest step in flight for all of its ranks."""
    behind: set[int] = set()
    for step_id, step in in_flight.items():
        if behind.isdisjoint(step.ranks):
            yield step_id, step
        behind.update(step.ranks)


def _first_done(in_flight: Mapping[int, _InFlight]) -> int | None:
    """Return the first step that all of its ranks have finished.

    A later step has to wait while any of its ranks still has an earlier step in flight. Tokens therefore arrive in
    order.
    """
    return next((step_id for step_id, step in _foremost(in_flight) if step.is_done), None)


def _stages(layout: Layout, step: Step) -> list[list[tuple[int, ...]]]:
    """Return the ranks that run a step, in the form of `_InFlight.stages`."""
    if not step.turn.instances:
        return [[ranks] for ranks in layout.stage_groups()]
    return [[layout.tpa_groups()[instance] for instance in step.turn.instances]]


def _check_same_collectives(results: Sequence[StepResult], ranks: Sequence[int]) -> None:
    """Raise EngineError if a rank ran different collectives from the first rank, because the results are then wrong."""
    expected = results[0].measured.fingerprint
    others = [rank for rank, result in zip(ranks, results, strict=True) if result.measured.fingerprint != expected]
    if others:
        raise EngineError(f"in step {results[0].step_id} ranks {others} ran different collectives from rank {ranks[0]}")
