"""Measures how much longer prefills take than they would alone."""

_SHARE = 0.1  # weight of the last step in the average


class Pace:
    """Averages the time of steps with chunks, relative to the predicted time of their chunks alone. At least 1.

    It is above 1 because steps also have decodes, and may leave time unused.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._alone_s: dict[int, float] = {}

    def add(self, step_id: int, alone_s: float) -> None:
        """Add a chunk to a step. alone_s: predicted seconds of the chunk alone."""
        self._alone_s[step_id] = self._alone_s.get(step_id, 0.0) + alone_s

    def ended(self, step_id: int, taken_s: float) -> None:
        alone_s = self._alone_s.pop(step_id)
        if alone_s > 0:
            self.factor += _SHARE * (max(taken_s / alone_s, 1.0) - self.factor)
