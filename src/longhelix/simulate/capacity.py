"""Find the capacity of a server: the highest request rate at which a workload meets its service level."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

ATTAINMENT = 0.99
_PRECISION = 0.02
_MOST_DOUBLINGS = 14


@dataclass(frozen=True)
class Trial:
    """One simulation at a request rate."""

    rate_rps: float
    slo_attainment: float  # fraction of requests that met their service level

    @property
    def is_met(self) -> bool:
        return self.slo_attainment >= ATTAINMENT


@dataclass(frozen=True)
class Capacity:
    """The highest rate that meets the service level, with a relative precision of _PRECISION."""

    rate_rps: float | None  # None if no rate meets the service level
    is_bounded: bool  # True if the search found a rate that misses the service level
    trials: tuple[Trial, ...]  # all trials, in the order in which they ran


def find_capacity(attainment: Callable[[float], float], start_rps: float) -> Capacity:
    """Find the capacity: double or halve the rate until two rates bracket the capacity, then bisect.

    Args:
        attainment: simulates a rate and returns the fraction of requests that meet their service level.
        start_rps: the first rate to try.
    """
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
