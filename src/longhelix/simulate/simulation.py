"""Run a simulation: the engine's loop and scheduler, with a runner that predicts steps instead of running a model."""

import math
from dataclasses import dataclass, field
from functools import cached_property

from longhelix.errors import UserError
from longhelix.perf.setting import Setting
from longhelix.perf.step_cost import StepCost
from longhelix.scheduler.config import SchedulerConfig
from longhelix.scheduler.cut import Cut
from longhelix.scheduler.loop import Loop, leads_of, most_in_flight
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.token_event import TokenEvent
from longhelix.simulate.arrival import Arrival, Workload
from longhelix.simulate.arrivals import Arrivals
from longhelix.simulate.histogram import Histogram
from longhelix.simulate.request_tracker import RequestRecord, RequestTracker
from longhelix.simulate.runner import PredictedRunner, SimulatedRunner, SimulatedStep
from longhelix.simulate.timeline import Sample, Timeline
from longhelix.spec.layout import Layout


@dataclass(frozen=True)
class Server:
    """Configuration of the simulated server: a layout of a model on a system, and scheduler settings."""

    setting: Setting
    layout: Layout
    scheduler: SchedulerConfig
    hop_b: bool = True  # True if exchanges may overlap with attention (HOP-B)

    def __post_init__(self) -> None:
        assert (self.scheduler.kvp, self.scheduler.steps.pp) == (self.layout.kvp, self.layout.pp)

    @cached_property
    def cost(self) -> StepCost:
        placement = self.scheduler.placement.name
        local = placement == "local" and self.layout.kvp > 1 and not self.scheduler.steps.own_clocks
        return StepCost(self.setting, self.layout, local=local, even=placement == "striped")

    def make_scheduler(self) -> Scheduler:
        overlaps = self.hop_b and self.layout.kvp > 1 and self.layout.ffn_replicas == 1
        return Scheduler(self.scheduler, self.cost, cut=Cut(self.cost) if overlaps else None, swap_s=self._swap_s)

    def make_runner(self) -> PredictedRunner:
        return PredictedRunner(
            cost=self.cost,
            stages=self.layout.pp,
            swap_s=self._swap_s,
            move_s=self._move_s,
            clocks=self.scheduler.clocks,
        )

    @property
    def _swap_s(self) -> float:
        return self.cost.swap_seconds(self.scheduler.block_tokens)

    def _move_s(self, sent: int, received: int) -> float:
        return self.cost.move_seconds(sent, received, self.scheduler.block_tokens)


class Observer:
    """Base class for observers of a simulation. The base class ignores all events."""

    def ran(self, step: SimulatedStep) -> None:
        """Handle the end of a step."""

    def ended(self, id: int, record: RequestRecord) -> None:
        """Handle the end of a request."""


@dataclass(frozen=True)
class Outcome:
    """The results of a simulation. Times are in seconds."""

    requests: int
    finished: int
    refused: int  # number of requests that can never run
    refusal: str  # reason why the first refused request cannot run; empty if no request was refused
    met: int  # number of requests that finished and met their service level
    steps: int  # number of steps that took time
    tokens: int
    duration_s: float  # time from the first arrival to the end of the last step
    busy_s: float  # time during which a step ran; if KVP instances have their own clocks, the mean over them
    gpu_s: float  # busy_s times the number of GPUs
    ttft: Histogram = field(repr=False)
    tbt: Histogram = field(repr=False)
    wait: Histogram = field(repr=False)  # time from arrival to the start of the first chunk
    timeline: tuple[Sample, ...] = field(repr=False)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.duration_s if self.duration_s else 0.0

    @property
    def goodput_rps(self) -> float:
        return self.met / self.duration_s if self.duration_s else 0.0

    @property
    def slo_attainment(self) -> float:
        """Fraction of all arrived requests that met their service level."""
        return self.met / self.requests if self.requests else 0.0


def simulate(server: Server, workload: Workload, observer: Observer | None = None) -> Outcome:
    """Simulate a server with a workload until all requests have ended."""
    simulation = Simulation(server.make_scheduler(), server.make_runner(), workload, observer)
    simulation.run()
    return simulation.outcome(server.layout.world_size)


class Simulation:
    """Runs one workload on one scheduler, step by step, with the same number of steps in flight as the engine."""

    def __init__(
        self, scheduler: Scheduler, runner: SimulatedRunner, workload: Workload, observer: Observer | None = None
    ) -> None:
        self._runner = runner
        pp = scheduler.config.steps.pp
        self._loop = Loop(
            scheduler=scheduler, runner=runner, clock=lambda: runner.now_s, depth=most_in_flight(pp), leads=leads_of(pp)
        )
        self._arrivals = Arrivals(workload)
        self._first_s = self._arrivals.next_s or 0.0
        self._observer = observer
        self._tracker = RequestTracker()
        self._timeline = Timeline(scheduler.config.block_tokens)
        self._next_id = 0
        self._in_sessions: dict[int, Arrival] = {}
        self._refused, self._refusal = 0, ""
        self._steps = 0
        clocks = scheduler.config.clocks
        self._busy_s, self._busy_until_s = [0.0] * clocks, [0.0] * clocks

    def run(self) -> None:
        while self.step():
            pass

    def step(self) -> bool:
        """Queue the requests that have arrived, and run until the next step ends.

        Returns False if all requests have ended.
        """
        self._arrive()
        stepped = self._loop.step(self._patience_s)
        if stepped is not None:
            self._note(stepped[1])
            return True
        return self._wait()

    @property
    def _patience_s(self) -> float:
        """Maximum wait for a result, in seconds.

        With one clock per instance, the wait ends at the next arrival, because an idle instance may take the request.
        """
        next_s = self._arrivals.next_s if len(self._busy_s) > 1 else None
        return math.inf if next_s is None else next_s - self._runner.now_s

    def _wait(self) -> bool:
        """Advance the clock to the next arrival, even if steps are in flight. Returns False if no request arrives."""
        assert self._runner.runs or not self._loop.has_work, "requests wait, but nothing runs"
        next_s = self._arrivals.next_s
        if next_s is None:
            return False
        if not self._runner.runs:
            self._sample()
        self._runner.wait_until(next_s)
        return True

    def outcome(self, num_gpus: int) -> Outcome:
        tracker = self._tracker
        return Outcome(
            requests=tracker.requests,
            finished=tracker.finished,
            refused=self._refused,
            refusal=self._refusal,
            met=tracker.met,
            steps=self._steps,
            tokens=tracker.tokens,
            duration_s=self._runner.now_s - self._first_s,
            busy_s=sum(self._busy_s) / len(self._busy_s),
            gpu_s=num_gpus * sum(self._busy_s) / len(self._busy_s),
            ttft=tracker.ttft,
            tbt=tracker.tbt,
            wait=tracker.wait,
            timeline=tuple(self._timeline.samples),
        )

    def _arrive(self) -> None:
        """Queue the requests that have arrived."""
        while (arrival := self._arrivals.take(self._runner.now_s)) is not None:
            self._add(arrival)

    def _add(self, arrival: Arrival) -> None:
        try:
            self._loop.add(arrival.request(self._next_id))
        except UserError as error:
            self._tracker.refuse()
            self._refused += 1
            self._refusal = self._refusal or str(error)
            self._arrivals.ended(arrival, self._runner.now_s)
            return
        self._tracker.open(self._next_id, arrival.arrival_s, arrival.prompt_tokens, arrival.service)
        if arrival.session:
            self._in_sessions[self._next_id] = arrival
        self._next_id += 1

    def _note(self, events: list[TokenEvent]) -> None:
        ran = self._runner.last
        assert ran is not None
        if ran.end_s > ran.begin_s:
            self._steps += 1
            for clock in ran.step.turn.instances or (0,):
                self._busy_s[clock] += ran.end_s - max(ran.begin_s, self._busy_until_s[clock])
                self._busy_until_s[clock] = ran.end_s
        ended = self._tracker.add(ran, events)
        for id, _ in ended:
            if id in self._in_sessions:
                self._arrivals.ended(self._in_sessions.pop(id), self._runner.now_s)
        if self._runner.now_s >= self._timeline.next_s:
            self._sample()
        if self._observer is not None:
            self._observer.ran(ran)
            for id, record in ended:
                self._observer.ended(id, record)

    def _sample(self) -> None:
        scheduler = self._loop.scheduler
        self._timeline.add(self._runner.now_s, scheduler.running, scheduler.num_waiting)
