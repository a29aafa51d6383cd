"""Histogram of durations in constant memory."""

import math
from array import array
from collections.abc import Sequence

_LEAST_S, _MOST_S = 1e-7, 1e8
_BINS_PER_E = 1000
RELATIVE_ERROR = 0.5 / _BINS_PER_E


class Histogram:
    """Histogram of durations in seconds. Each bin is 0.1% wide.

    The count, sum, minimum and maximum are exact. Percentiles between 0.1 us and three years have a relative error of
    at most RELATIVE_ERROR.
    """

    def __init__(self) -> None:
        self._counts = array("q", bytes(8 * (_bin(_MOST_S) + 1)))
        self.count = 0
        self.sum_s = 0.0
        self.least_s = math.inf
        self.most_s = 0.0

    def add(self, seconds: float, times: int = 1) -> None:
        if not times:
            return
        self._counts[_bin(seconds)] += times
        self.count += times
        self.sum_s += seconds * times
        if seconds < self.least_s:
            self.least_s = seconds
        if seconds > self.most_s:
            self.most_s = seconds

    def percentile(self, percent: float) -> float | None:
        """Return the nearest-rank percentile in seconds; None if the histogram is empty."""
        return self.percentiles([percent])[0]

    def percentiles(self, percents: Sequence[float]) -> list[float | None]:
        """Return several percentiles. `percents` must be in ascending order."""
        if not self.count:
            return [None] * len(percents)
        found: list[float | None] = []
        index, seen = 0, self._counts[0]
        for percent in percents:
            while seen < rank(percent, self.count):
                index += 1
                seen += self._counts[index]
            middle_s = _LEAST_S * math.exp((index + 0.5) / _BINS_PER_E)
            found.append(min(max(middle_s, self.least_s), self.most_s))
        return found

    def curve(self, points: int) -> list[tuple[float, float]]:
        """Return `points` pairs (seconds, percent) of the cumulative distribution; empty if the histogram is empty."""
        shares = [100 * (point + 1) / points for point in range(points)]
        found = self.percentiles(shares)
        return [(seconds, share) for seconds, share in zip(found, shares, strict=True) if seconds is not None]


def rank(percent: float, count: int) -> int:
    """Return the nearest rank of a percentile, from 1 to `count`."""
    return min(max(math.ceil(percent / 100 * count - 1e-9), 1), count)


def _bin(seconds: float) -> int:
    if seconds <= _LEAST_S:
        return 0
    return int(math.log(min(seconds, _MOST_S) / _LEAST_S) * _BINS_PER_E)
