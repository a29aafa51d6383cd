"""Seconds of a scheduler's step: the interface that the scheduler, the simulator and chunk sizing share."""

from longhelix.layout import Layout
from longhelix.perf.layouts import Layouts
from longhelix.perf.setting import Setting
from longhelix.perf.step import step_seconds
from longhelix.perf.work import Work
from longhelix.request import Step


class Lengths:
    """Every sequence's length, followed from steps, as workers do."""

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}

    def advance(self, step: Step) -> Work:
        """What `step` computes; steps must come in order."""
        for ended in step.ended:
            self._lengths.pop(ended, None)
        work = Work()
        for piece in step.work:
            prefix = self._lengths.get(piece.id, 0)
            self._lengths[piece.id] = prefix + piece.num_tokens
            work = work + _of_sequence(piece.num_tokens, prefix, piece.sample)
        return work


class Predictor:
    """Prices steps, which must come in order."""

    def __init__(self, setting: Setting, layout: Layout, *, hop_b: bool = True) -> None:
        self._setting = setting
        self._layouts = Layouts.of([layout], hop_b=hop_b)
        self._lengths = Lengths()

    def predict(self, step: Step) -> float:
        """Seconds that `step` takes."""
        return float(step_seconds(self._setting, self._layouts, self._lengths.advance(step))[0])


def _of_sequence(rows: int, prefix: int, sample: bool) -> Work:
    if rows == 1:
        return Work(decode_rows=1.0, decode_kv_tokens=prefix + 1.0, sampled_rows=float(sample))
    return Work.chunk(float(rows), float(prefix)) + Work(sampled_rows=float(sample))
