"""Measures how exchanges overlapped attention while a request ran. Each step is recorded once for all requests."""

from bisect import bisect_left
from dataclasses import dataclass

from longhelix.scheduler.step import StepMeasurements


@dataclass(frozen=True)
class HopB:
    """The exchanges of the steps that ran between a request's arrival and its end."""

    # Largest number of parts into which a step's attention was split. 1 means one exchange per layer, 0 means none.
    parts: int = 1
    exchanges: int = 0  # number of exchanges per layer, over all steps; 0 with one KVP rank
    # Seconds that a rank waited for exchanges after it had computed all of its attention, including waits for late
    # peers. Each step adds the longest wait of any rank. None if the time is not measured. It is not measured if ranks
    # share memory, on GPUs, with compiled layers, or with one KVP rank.
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

    The numbers of a request are the difference between two moments, so a step does not have to update every request.
    """

    def __init__(self, kvp: int) -> None:
        self._kvp = kvp
        self._now = Moment(0, 0, 0.0, 0)
        # (step, parts) of each step that had more parts than every later step. The entries are in the order of the
        # steps, so `parts` decreases. The first entry after a moment has the largest number of parts since then.
        self._peaks: list[tuple[int, int]] = []

    @property
    def now(self) -> Moment:
        """The current totals."""
        return self._now

    def add(self, step: StepMeasurements) -> None:
        """Add a step to the totals."""
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
