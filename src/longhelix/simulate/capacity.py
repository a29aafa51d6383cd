"""The highest rate at which a workload's requests still meet their service level."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

ATTAINMENT = 0.99
_PRECISION = 0.02
_MOST_DOUBLINGS = 14


@dataclass(frozen=True)
class Trial:
    """How many of the requests met their service level at a rate."""

    rate_rps: float
    slo_attainment: float

    @property
    def is_met(self) -> bool:
        return self.slo_attainment >= ATTAINMENT


@dataclass(frozen=True)
class Capacity:
    """The highest rate that was found to be met, to _PRECISION of itself, and all that was tried, in order.

    None where no rate is met; `is_bounded` is false where none was found that is not.
    """

    rate_rps: float | None
    is_bounded: bool
    trials: tuple[Trial, ...]


def find_capacity(attainment: Callable[[float], float], start_rps: float) -> Capacity:
    """Double or halve `start_rps` until it is between a rate that is met and one that is not, then bisect."""
    trials: list[Trial] = []

    def is_met(rate_rps: float) -> bool:
        trials.append(Trial(rate_rps, attainment(rate_rps)))
        return trials[-1].is_met

    met: float | None = None
    missed: float | None = None
    for rate_rps in _rates(start_rps, up=is_met(start_rps)):
        first = trials[0].is_met
        if is_met(rate_rps) != first:
            met, missed = (rate_rps / 2, rate_rps) if first else (rate_rps, rate_rps * 2)
            break
    if met is None or missed is None:
        return Capacity(trials[-1].rate_rps if trials[0].is_met else None, not trials[0].is_met, tuple(trials))
    while missed - met > _PRECISION * met:
        middle = (met + missed) / 2
        met, missed = (middle, missed) if is_met(middle) else (met, middle)
    return Capacity(met, True, tuple(trials))


def _rates(start_rps: float, up: bool) -> Iterator[float]:
    for doubling in range(1, _MOST_DOUBLINGS + 1):
        yield start_rps * 2.0 ** (doubling if up else -doubling)
