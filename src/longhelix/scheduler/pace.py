"""How much longer prefills take than they would alone."""

_SHARE = 0.1  # of the last step in what is known


class Pace:
    """What steps with chunks take, for each second that their chunks were predicted to take alone: decodes are in the
    same steps, and a step may spare some of its time. At least 1."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._alone_s: dict[int, float] = {}

    def add(self, step_id: int, alone_s: float) -> None:
        """A chunk more of a step: what it would take alone."""
        self._alone_s[step_id] = self._alone_s.get(step_id, 0.0) + alone_s

    def ended(self, step_id: int, taken_s: float) -> None:
        alone_s = self._alone_s.pop(step_id)
        if alone_s > 0:
            self.factor += _SHARE * (max(taken_s / alone_s, 1.0) - self.factor)
