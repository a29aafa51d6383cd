"""A cost that is corrected by what steps took."""

from longhelix.request import Cost, Work

_WEIGHT = 0.05  # of a new step in the average
_FARTHEST = 4.0  # from the prediction, either way
_ODD = 10.0  # steps that took so many times as long say something of other things: a suspended machine, a compiler


class CorrectedCost:
    """`cost`, times a factor for steps of decodes alone and one for steps with chunks of prompts.

    Each factor follows slowly what steps took beside what was predicted, and stays within a quarter and four times. It
    changes chunk sizes, and no token.
    """

    def __init__(self, cost: Cost) -> None:
        self._cost = cost
        self.decode_factor = 1.0
        self.chunk_factor = 1.0

    def seconds(self, work: Work) -> float:
        return self._cost.seconds(work) * (self.chunk_factor if work.chunk_rows else self.decode_factor)

    def observe(self, work: Work, taken_s: float) -> None:
        """A step took so long. One without rows says nothing."""
        if not work.rows:
            return
        predicted_s = self._cost.seconds(work)
        if not 0 < taken_s < _ODD * _FARTHEST * predicted_s:
            return
        if work.chunk_rows:
            self.chunk_factor = _moved(self.chunk_factor, taken_s / predicted_s)
        else:
            self.decode_factor = _moved(self.decode_factor, taken_s / predicted_s)


def _moved(factor: float, ratio: float) -> float:
    return factor + _WEIGHT * (min(max(ratio, 1 / _FARTHEST), _FARTHEST) - factor)
