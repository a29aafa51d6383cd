"""Replay the recording of a live scheduling loop in the simulator, with the recorded requests and step times."""

import math
from collections import deque
from collections.abc import Iterable

from longhelix.scheduler.recording import Aborted, Added, Completed, Event, Scheduled
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.step import Step, StepResult
from longhelix.simulate.runner import SimulatedRunner
from longhelix.simulate.simulation import Simulation


class MeasuredRunner(SimulatedRunner):
    """Runner that returns the recorded results in order.

    Its clock shows the recorded time of the next scheduling decision.
    """

    def __init__(self, events: Iterable[Event], clocks: int) -> None:
        super().__init__(clocks=clocks)
        self._events = deque(events)
        self._results = {event.result.step_id: event.result for event in self._events if isinstance(event, Completed)}
        self._tell_time()

    @property
    def next(self) -> Event | None:
        """Return the next recorded event; None at the end."""
        return self._events[0] if self._events else None

    def advance(self) -> None:
        """Remove the next event, because it has been replayed."""
        self._events.popleft()
        self._tell_time()

    def _tell_time(self) -> None:
        if isinstance(self.next, Scheduled):
            self.now_s = self.next.now_s

    def _result(self, step: Step) -> StepResult:
        return self._results[step.id]

    def _next(self) -> int:
        assert isinstance(self.next, Completed)
        return [ran.step.id for ran in self._in_flight].index(self.next.result.step_id)

    def collect(self, timeout_s: float) -> StepResult | None:
        """Return the recorded result; None if the live loop did not wait for a result at this point."""
        return super().collect(math.inf) if isinstance(self.next, Completed) else None


class Replay(Simulation):
    """Runs the events of a recording through a scheduler that starts in the same state as the live scheduler.

    `events` contains the replayed events. They differ from the recorded events if this scheduler makes different
    decisions. The recording must start and end without steps in flight.
    """

    def __init__(self, scheduler: Scheduler, events: Iterable[Event]) -> None:
        self._measured = MeasuredRunner(events, scheduler.config.clocks)
        super().__init__(scheduler, self._measured, ())
        self.events: list[Event] = []
        self._first_s = self._measured.now_s
        self._loop.on_event = self._on_event

    def _on_event(self, event: Event) -> None:
        self.events.append(event)
        self._measured.advance()

    def _arrive(self) -> None:
        """Add and abort the requests that the recording adds and aborts at this point."""
        while isinstance(event := self._measured.next, Added | Aborted):
            if isinstance(event, Added):
                request = event.request
                self._loop.add(request)
                self._tracker.open(request.id, request.arrival_s, len(request.prompt_token_ids), request.service)
            else:
                self._loop.abort(event.request_id)
                self._tracker.drop(event.request_id)

    def step(self) -> bool:
        self._arrive()
        if self._measured.next is None:
            return False
        num_events = len(self.events)
        super().step()
        assert len(self.events) > num_events, f"nothing happened, but {self._measured.next} was recorded"
        return True

    def _wait(self) -> bool:
        """Do nothing, because the recording advances the clock."""
        return True
