"""A cost that is corrected by what steps took."""

from statistics import median_low

from longhelix.scheduler.work import Cost, Work

_STEPS = 20  # a factor is the middle one of these at first, and then goes so small a part of the way with each one more
_FARTHEST = 16.0  # from the prediction, either way
_ODD = 40.0  # steps that took so many times as long say something of other things: a suspended machine, a compiler


class CorrectedCost:
    """`cost`, times a factor for steps of decodes alone and one for steps with chunks of prompts.

    Each factor is what steps took beside what was predicted, of machines that nobody has calibrated too: the median of
    the prediction itself and the first twenty, so that one odd step is none, and then it follows slowly. It changes
    chunk sizes, and no token.
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
        """A step took so long. One without rows says nothing."""
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
