"""The loop: it carries steps from the scheduler to a Runner. The live engine and a simulation differ only in the
runner."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from longhelix.scheduler.recording import Aborted, Added, Completed, Event, Scheduled
from longhelix.scheduler.request import Request
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.step import Step, StepResult
from longhelix.scheduler.token_event import TokenEvent, Usage

# Ranks begin the next step while the scheduler takes the tokens of the last one.
STEPS_IN_FLIGHT = 2


def most_in_flight(pp: int) -> int:
    """With pipeline stages, one more than these, so that all of them have one."""
    return STEPS_IN_FLIGHT if pp == 1 else pp + 1


def leads_of(pp: int) -> Callable[[Step], bool]:
    """Which steps let the next one be sent before they end.

    In one stage those without chunks of prompts: beside these the time between steps is nothing, and requests that come
    meanwhile would wait for two such steps. With several stages all, because each takes a step of its own.
    """
    return (lambda step: not step.chunks) if pp == 1 else lambda step: True


class Runner(Protocol):
    """Computes steps. `collect` returns the next result, or None if it takes longer than `timeout_s`: in the order of
    `submit`, of instances with clocks of their own in that order for each of them."""

    def submit(self, step: Step) -> None: ...

    def collect(self, timeout_s: float) -> StepResult | None: ...


@dataclass
class _Clock:
    """Ranks that are in one step at a time. is_led: by the last step that was sent."""

    in_flight: int = 0
    is_led: bool = True


class Loop:
    """One scheduler over one runner, with at most `depth` steps in flight, of instances with clocks of their own for
    each of them. `clock` gives the time in seconds.

    leads: whether the next step may be sent before this one has ended (default: any step). on_event: called with
    each event between the loop and the scheduler, in order; a list's `append` records them.
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
        self._of_step: dict[int, list[_Clock]] = {}  # of the steps in flight

    @property
    def has_work(self) -> bool:
        return bool(self._of_step) or self.scheduler.has_work

    def add(self, request: Request, hashes: Sequence[bytes] = ()) -> None:
        """Queue a request. hashes: see `Scheduler.add`. Raises UserError if it could never run."""
        self.scheduler.add(request, hashes)
        self.on_event(Added(request, hashes))

    def abort(self, request_id: int) -> Usage | None:
        """End a request in any phase. Its blocks are free at once; the ranks hear of it with the next step.

        Returns what it held and took, or None if it has already ended.
        """
        self.on_event(Aborted(request_id))
        return self.scheduler.end(request_id)

    def step(self, timeout_s: float = math.inf) -> tuple[StepResult, list[TokenEvent]] | None:
        """Fill the pipeline, then wait for its next result. None: there is nothing to do, or that takes longer than
        `timeout_s`."""
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
        """The clocks that have all steps that they may have."""
        return {at for at, clock in enumerate(self._clocks) if clock.in_flight >= (self._depth if clock.is_led else 1)}

    def _begin(self, step: Step) -> None:
        clocks = self._of_step[step.id] = [self._clocks[at] for at in step.turn.instances or (0,)]
        for clock in clocks:
            clock.in_flight += 1
            clock.is_led = self._leads(step)
