"""How exchanges overlapped attention while a request ran. Steps are counted once, for all requests together."""

from bisect import bisect_left
from dataclasses import dataclass

from longhelix.scheduler.step import StepResult


@dataclass(frozen=True)
class HopB:
    """The exchanges of the steps that ran between a request's arrival and its end.

    parts: the most parts that one of the steps attended in; 1 is one exchange, 0 none. exchanges: of each layer, over
    all steps; 0 with one KVP rank. exposed_s: for each step, the longest time that a rank waited for exchanges with
    nothing left to attend to, late peers included; summed over the steps. None where that is not measured: ranks that
    share memory, GPUs, compiled layers, one KVP rank.
    """

    parts: int = 1
    exchanges: int = 0
    exposed_s: float | None = 0.0


@dataclass(frozen=True)
class Moment:
    """The totals of the log when a request arrived."""

    steps: int
    exchanges: int
    exposed_s: float
    unmeasured_steps: int


class ExchangeLog:
    """Totals over all steps. A request's numbers are the difference of two moments, so a step does not touch every
    request."""

    def __init__(self, kvp: int) -> None:
        self._kvp = kvp
        self._now = Moment(0, 0, 0.0, 0)
        # Steps that no later one matched in parts, parts falling: the first since a moment had the most.
        self._peaks: list[tuple[int, int]] = []

    @property
    def now(self) -> Moment:
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
        """The exchanges of the steps after `moment`."""
        first = bisect_left(self._peaks, (moment.steps, 0))
        return HopB(
            parts=self._peaks[first][1] if first < len(self._peaks) else 1,
            exchanges=self._now.exchanges - moment.exchanges,
            exposed_s=None
            if self._now.unmeasured_steps > moment.unmeasured_steps
            else self._now.exposed_s - moment.exposed_s,
        )
