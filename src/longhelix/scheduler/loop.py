"""The loop passes steps from the scheduler to a runner. The live engine and a simulation differ only in the runner."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from longhelix.scheduler.recording import Aborted, Added, Completed, Event, Scheduled
from longhelix.scheduler.request import Request
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.step import Step, StepResult
from longhelix.scheduler.token_event import TokenEvent, Usage

# Ranks begin the next step while the scheduler takes the tokens of the last step.
STEPS_IN_FLIGHT = 2


def most_in_flight(pp: int) -> int:
    """Return the most steps in flight. With several stages, one more than stages, so that each stage has a step."""
    return STEPS_IN_FLIGHT if pp == 1 else pp + 1


def leads_of(pp: int) -> Callable[[Step], bool]:
    """Return a function that decides whether the next step may be sent before a step ends.

    With one stage, this holds for steps without chunks of prompts. Steps with chunks are long, so a gap between them
    hardly matters, and requests that arrive meanwhile would wait for two of them. With several stages, it holds for all
    steps, because each stage computes its own step.
    """
    return (lambda step: not step.chunks) if pp == 1 else lambda step: True


class Runner(Protocol):
    """Computes steps.

    `collect` returns the next result, or None if it takes longer than `timeout_s`. Results come in the order of
    `submit`. If instances have their own clocks, this holds for each instance.
    """

    def submit(self, step: Step) -> None: ...

    def collect(self, timeout_s: float) -> StepResult | None: ...


@dataclass
class _Clock:
    """The state of ranks that are in the same step at a time.

    Attributes:
        in_flight: Their steps in flight.
        is_led: Whether the next step may be sent before the last one that was sent ends.
    """

    in_flight: int = 0
    is_led: bool = True


class Loop:
    """Runs the steps of a scheduler on a runner.

    Args:
        clock: Returns the time in seconds.
        depth: The most steps in flight. If instances have their own clocks, this holds for each instance.
        leads: Whether the next step may be sent before a step has ended (default: always).
        on_event: Called with each event between the loop and the scheduler, in order. A list's `append` records them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float],
        depth: int = 1,
        leads: Callable[[Step], bool] = lambda step: True,
        on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.scheduler = scheduler
        self.on_event = on_event
        self._runner = runner
        self._clock = clock
        self._depth = depth
        self._leads = leads
        self._clocks = [_Clock() for _ in range(scheduler.config.clocks)]
        self._of_step: dict[int, list[_Clock]] = {}  # by id of a step in flight

    @property
    def has_work(self) -> bool:
        return bool(self._of_step) or self.scheduler.has_work

    def add(self, request: Request, hashes: Sequence[bytes] = ()) -> None:
        """Queue a request. hashes: see `Scheduler.add`. Raises UserError if it could never run."""
        self.scheduler.add(request, hashes)
        self.on_event(Added(request, hashes))

    def abort(self, request_id: int) -> Usage | None:
        """End a request in any phase. Its blocks are free at once. The next step tells the ranks.

        Returns the request's usage, or None if it has already ended.
        """
        self.on_event(Aborted(request_id))
        return self.scheduler.end(request_id)

    def step(self, timeout_s: float = math.inf) -> tuple[StepResult, list[TokenEvent]] | None:
        """Fill the pipeline, then wait for its next result.

        Returns None if there is nothing to do, or if the result takes longer than `timeout_s`.
        """
        while len(busy := self._busy()) < len(self._clocks):
            now_s = self._clock()
            step = self.scheduler.schedule(now_s, busy)
            self.on_event(Scheduled(now_s, step))
            if step is None:
                break
            self._runner.submit(step)
            self._begin(step)
        if not self._of_step:
            return None
        result = self._runner.collect(timeout_s)
        if result is None:
            return None
        for clock in self._of_step.pop(result.step_id):
            clock.in_flight -= 1
        self.on_event(Completed(result))
        return result, self.scheduler.complete(result)

    def _busy(self) -> set[int]:
        """Return the clocks that have the most steps in flight that they may have."""
        return {at for at, clock in enumerate(self._clocks) if clock.in_flight >= (self._depth if clock.is_led else 1)}

    def _begin(self, step: Step) -> None:
        clocks = self._of_step[step.id] = [self._clocks[at] for at in step.turn.instances or (0,)]
        for clock in clocks:
            clock.in_flight += 1
            clock.is_led = self._leads(step)
