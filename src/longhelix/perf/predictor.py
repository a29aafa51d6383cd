"""Seconds of a scheduler's step: the interface that the scheduler, the simulator and chunk sizing share."""

from longhelix.layout import Layout
from longhelix.perf.layouts import Layouts
from longhelix.perf.setting import Setting
from longhelix.perf.step import step_seconds
from longhelix.perf.work import Work
from longhelix.request import Step


class Predictor:
    """Follows every sequence's length from steps, as workers do, and prices each step."""

    def __init__(self, setting: Setting, layout: Layout, *, hop_b: bool = True) -> None:
        self._setting = setting
        self._layouts = Layouts.of([layout], hop_b=hop_b)
        self._lengths: dict[int, int] = {}

    def predict(self, step: Step) -> float:
        """Seconds that `step` takes; steps must come in order."""
        for ended in step.ended:
            self._lengths.pop(ended, None)
        work = Work()
        for piece in step.work:
            prefix = self._lengths.get(piece.id, 0)
            self._lengths[piece.id] = prefix + piece.num_tokens
            work = work + _of_sequence(piece.num_tokens, prefix, piece.sample)
        return float(step_seconds(self._setting, self._layouts, work)[0])


def _of_sequence(rows: int, prefix: int, sample: bool) -> Work:
    if rows == 1:
        return Work(decode_rows=1.0, decode_kv_tokens=prefix + 1.0, sampled_rows=float(sample))
    return Work.chunk(float(rows), float(prefix)) + Work(sampled_rows=float(sample))
