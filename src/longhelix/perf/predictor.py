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
        # In plain numbers, because every step of the live engine comes by here.
        decode_rows = decode_kv_tokens = chunk_rows = chunk_kv_tokens = sampled_rows = 0
        chunk_pairs = 0.0
        for piece in step.work:
            rows, prefix = piece.num_tokens, self._lengths.get(piece.id, 0)
            self._lengths[piece.id] = prefix + rows
            sampled_rows += piece.sample
            if rows == 1:
                decode_rows += 1
                decode_kv_tokens += prefix + 1
            else:
                chunk_rows += rows
                chunk_kv_tokens += prefix + rows
                chunk_pairs += rows * (prefix + (rows + 1) / 2)
        return Work(decode_rows, decode_kv_tokens, chunk_rows, chunk_kv_tokens, chunk_pairs, sampled_rows)


class Predictor:
    """Prices steps, which must come in order."""

    def __init__(self, setting: Setting, layout: Layout, *, hop_b: bool = True) -> None:
        self._setting = setting
        self._layouts = Layouts.of([layout], hop_b=hop_b)
        self._lengths = Lengths()

    def predict(self, step: Step) -> float:
        """Seconds that `step` takes."""
        return float(step_seconds(self._setting, self._layouts, self._lengths.advance(step))[0])
