"""A recording of a live loop, gone through again by the simulator: requests come as they came, and steps take what they
took."""

import math
from collections import deque
from collections.abc import Iterable

from longhelix.scheduler.recording import Aborted, Added, Completed, Event, Scheduled
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.step import Step, StepResult
from longhelix.simulate.runner import SimulatedRunner
from longhelix.simulate.simulation import Simulation


class MeasuredRunner(SimulatedRunner):
    """Gives the results that were recorded, each in its turn. Its clock says what the recorded one said when the loop
    asked it: at that time the scheduler decided."""

    def __init__(self, events: Iterable[Event], clocks: int) -> None:
        super().__init__(clocks=clocks)
        self._events = deque(events)
        self._results = {event.result.step_id: event.result for event in self._events if isinstance(event, Completed)}
        self._tell_time()

    @property
    def next(self) -> Event | None:
        """What came next; None at the end."""
        return self._events[0] if self._events else None

    def advance(self) -> None:
        """The next event has happened again."""
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
        """None where the live loop did not wait for the step's end."""
        return super().collect(math.inf) if isinstance(self.next, Completed) else None


class Replay(Simulation):
    """A recording through a scheduler that begins as the live one did. `heard` is what happened again; a scheduler that
    decides otherwise makes it differ from what was recorded.

    The recording begins and ends with no step in flight.
    """

    def __init__(self, scheduler: Scheduler, events: Iterable[Event]) -> None:
        self._measured = MeasuredRunner(events, scheduler.config.clocks)
        super().__init__(scheduler, self._measured, ())
        self.heard: list[Event] = []
        self._first_s = self._measured.now_s
        self._loop.hear = self._hear

    def _hear(self, event: Event) -> None:
        self.heard.append(event)
        self._measured.advance()

    def _arrive(self) -> None:
        """Add and abort what was added and aborted here."""
        while isinstance(event := self._measured.next, Added | Aborted):
            if isinstance(event, Added):
                request = event.request
                self._loop.add(request)
                self._ledger.open(request.id, request.arrival_s, len(request.prompt_token_ids), request.service)
            else:
                self._loop.abort(event.request_id)
                self._ledger.drop(event.request_id)

    def step(self) -> bool:
        self._arrive()
        if self._measured.next is None:
            return False
        heard = len(self.heard)
        super().step()
        assert len(self.heard) > heard, f"nothing happens, where {self._measured.next} was recorded"
        return True

    def _wait(self) -> bool:
        """Time passes as recorded."""
        return True
