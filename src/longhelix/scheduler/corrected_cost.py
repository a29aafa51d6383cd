"""A cost that is corrected by the measured time of steps."""

from statistics import median_low

from longhelix.scheduler.work import Cost, Work

_STEPS = 20  # a factor is the median of this many steps at first, and then follows with this time constant
_FARTHEST = 16.0  # the largest factor, and the inverse of the smallest
_ODD = 40.0  # slower steps by this factor are ignored: the machine was suspended, or a compiler ran


class CorrectedCost:
    """Multiplies `cost` by one factor for steps with only decodes, and another for steps with chunks of prompts.

    A factor is the measured time relative to the prediction, which also corrects for machines without calibration. At
    first, it is the median of 1 and the first twenty ratios, so one odd step has no effect. Then it follows slowly.
    It changes chunk sizes, but no tokens.
    """

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self._decode, self._chunk = _Factor(), _Factor()

    @property
    def decode_factor(self) -> float:
        return self._decode.value

    @property
    def chunk_factor(self) -> float:
        return self._chunk.value

    def seconds(self, work: Work) -> float:
        return self._cost.seconds(work) * (self.chunk_factor if work.chunk_rows else self.decode_factor)

    def observe(self, work: Work, taken_s: float) -> None:
        """Update a factor with the time of a step. Steps without rows are ignored."""
        if not work.rows:
            return
        predicted_s = self._cost.seconds(work)
        if not 0 < taken_s < _ODD * predicted_s:
            return
        (self._chunk if work.chunk_rows else self._decode).observe(taken_s / predicted_s)


class _Factor:
    def __init__(self) -> None:
        self.value = 1.0
        self._first = [self.value]

    def observe(self, ratio: float) -> None:
        ratio = min(max(ratio, 1 / _FARTHEST), _FARTHEST)
        if len(self._first) <= _STEPS:
            self._first.append(ratio)
            self.value = median_low(self._first)
        else:
            self.value += (ratio - self.value) / _STEPS
