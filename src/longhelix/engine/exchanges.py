"""Measures how exchanges overlapped attention while a request ran. Each step is counted once for all requests."""

from bisect import bisect_left
from dataclasses import dataclass

from longhelix.scheduler.step import StepResult


@dataclass(frozen=True)
class HopB:
    """The exchanges of the steps that ran between a request's arrival and its end."""

    parts: int = 1  # largest number of parts that a step's attention was split into; 1 is one exchange, 0 none
    exchanges: int = 0  # per layer, over all steps; 0 with one KVP rank
    # Seconds that a rank waited for exchanges with no attention left to compute, including waits for late peers: the
    # largest of all ranks in each step, summed over the steps. None where it is not measured: ranks that share memory,
    # GPUs, compiled layers, one KVP rank.
    exposed_s: float | None = 0.0


@dataclass(frozen=True)
class Moment:
    """The totals of the log when a request arrived."""

    steps: int
    exchanges: int
    exposed_s: float
    unmeasured_steps: int


class ExchangeLog:
    """Totals over all steps.

    A request's numbers are the difference between two moments, so a step does not have to update every request.
    """

    def __init__(self, kvp: int) -> None:
        self._kvp = kvp
        self._now = Moment(0, 0, 0.0, 0)
        # (step, parts) of the steps that had more parts than every later step, in order, so parts decrease. The first
        # entry since a moment has the most parts since then.
        self._peaks: list[tuple[int, int]] = []

    @property
    def now(self) -> Moment:
        """The present totals."""
        return self._now

    def add(self, step: StepResult) -> None:
        """Count one more step."""
        now = self._now
        while self._peaks and self._peaks[-1][1] <= step.parts:
            self._peaks.pop()
        self._peaks.append((now.steps, step.parts))
        self._now = Moment(
            now.steps + 1,
            now.exchanges + (step.parts if self._kvp > 1 else 0),
            now.exposed_s + (step.exposed_s or 0.0),
            now.unmeasured_steps + (step.exposed_s is None),
        )

    def since(self, moment: Moment) -> HopB:
        """Return the exchanges of the steps after `moment`."""
        first = bisect_left(self._peaks, (moment.steps, 0))
        return HopB(
            parts=self._peaks[first][1] if first < len(self._peaks) else 1,
            exchanges=self._now.exchanges - moment.exchanges,
            exposed_s=None
            if self._now.unmeasured_steps > moment.unmeasured_steps
            else self._now.exposed_s - moment.exposed_s,
        )
