"""The loop: it carries steps from the scheduler to a Runner. The live engine and a simulation differ only in the
runner."""

import math
from collections.abc import Callable
from typing import Protocol

from longhelix.request import Request, Step, StepResult
from longhelix.scheduler.recording import Aborted, Added, Completed, Event, Scheduled
from longhelix.scheduler.scheduler import Scheduler, TokenEvent, Usage

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
    """Computes steps. `collect` returns their results in the order of `submit`, or None if the next one takes longer
    than `timeout_s`."""

    def submit(self, step: Step) -> None: ...

    def collect(self, timeout_s: float) -> StepResult | None: ...


class Loop:
    """One scheduler over one runner, with at most `depth` steps in flight. `clock` gives the time in seconds.

    leads: whether the next step may be sent before this one has ended (default: any step). hear: is told all that the
    loop says to the scheduler and hears from it, in order; a list's `append` records it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        clock: Callable[[], float],
        depth: int = 1,
        leads: Callable[[Step], bool] = lambda step: True,
        hear: Callable[[Event], None] = lambda event: None,
    ) -> None:
        self.scheduler = scheduler
        self.hear = hear
        self._runner = runner
        self._clock = clock
        self._depth = depth
        self._leads = leads
        self._in_flight = 0
        self._is_led = True  # by the last step that was sent

    @property
    def has_work(self) -> bool:
        return self._in_flight > 0 or self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError if it could never run."""
        self.scheduler.add(request)
        self.hear(Added(request))

    def abort(self, request_id: int) -> Usage | None:
        """End a request in any phase. Its blocks are free at once; the ranks hear of it with the next step.

        Returns what it held and took, or None if it has already ended.
        """
        self.hear(Aborted(request_id))
        return self.scheduler.end(request_id)

    def step(self, timeout_s: float = math.inf) -> tuple[StepResult, list[TokenEvent]] | None:
        """Fill the pipeline, then wait for its oldest step. None: there is nothing to do, or the step takes longer than
        `timeout_s`."""
        while self._in_flight < (self._depth if self._is_led else 1):
            now_s = self._clock()
            step = self.scheduler.schedule(now_s)
            self.hear(Scheduled(now_s, step))
            if step is None:
                break
            self._runner.submit(step)
            self._in_flight += 1
            self._is_led = self._leads(step)
        if not self._in_flight:
            return None
        result = self._runner.collect(timeout_s)
        if result is None:
            return None
        self._in_flight -= 1
        self.hear(Completed(result))
        return result, self.scheduler.complete(result)
