"""Time to first token against time between tokens, over layouts and chunk sizes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.memory import memory
from longhelix.perf.prefill import prefill_seconds
from longhelix.perf.step import cycle_seconds
from longhelix.plan.question import Question
from longhelix.plan.space import Space

CHUNKS = tuple(2**power for power in range(5, 14))


@dataclass(frozen=True)
class Latencies:
    """For every layout and chunk size: TTFT of one prompt, and TBT of its users while another is prefilled (L, C).

    Both are infinite where memory does not hold the users. gpus: (L,).
    """

    ttft_s: Array
    tbt_s: Array
    gpus: Array

    def best_s(self, tbt_s: float | None) -> Array:
        """Each layout's best TTFT with a chunk that keeps the TBT (L,)."""
        kept = self.ttft_s if tbt_s is None else np.where(self.tbt_s <= tbt_s, self.ttft_s, np.inf)
        return np.asarray(kept.min(axis=1))

    def frontier(self) -> NDArray[np.intp]:
        """Flat indices of layouts and chunks that no other one beats in both, from the least TBT to the most."""
        ttft_s, tbt_s = self.ttft_s.ravel(), self.tbt_s.ravel()
        order = np.lexsort((np.broadcast_to(self.gpus[:, None], self.ttft_s.shape).ravel(), ttft_s, tbt_s))
        order = order[np.isfinite(ttft_s[order])]
        best = np.minimum.accumulate(ttft_s[order])
        falls = np.concatenate([[True], best[1:] < best[:-1]]) if len(order) else np.zeros(0, dtype=np.bool_)
        return np.asarray(order[falls])

    def fewest_gpus(self, ttft_s: float, tbt_s: float) -> int | None:
        """Flat index of the layout and chunk with the fewest GPUs that keep both, and of those the least TTFT."""
        keeps = (self.ttft_s <= ttft_s) & (self.tbt_s <= tbt_s)
        if not keeps.any():
            return None
        gpus = np.where(keeps, self.gpus[:, None], np.inf)
        return int(np.lexsort((self.ttft_s.ravel(), gpus.ravel()))[0])


def latencies(question: Question, space: Space) -> Latencies:
    """Cost every layout with every chunk size for one prompt of the question's context beside its users."""
    layouts, setting = space.layouts, question.setting
    shape = (len(layouts), len(CHUNKS))
    ttft_s, tbt_s = np.full(shape, np.inf), np.full(shape, np.inf)
    for column, chunk in enumerate(CHUNKS):
        needed = memory(setting, layouts, float(question.users), question.context, float(chunk)).total_bytes
        fits = np.flatnonzero(needed <= setting.capacity_bytes(layouts))
        if len(fits):
            held = layouts.take(fits)
            ttft_s[fits, column] = prefill_seconds(setting, held, float(question.context), float(chunk))
            tbt_s[fits, column] = _mixed_seconds(question, held, float(chunk))
    return Latencies(ttft_s, tbt_s, layouts.world_size)


def _mixed_seconds(question: Question, layouts: Layouts, chunk: float) -> Array:
    """A step with the last chunk of a prompt, and one token for each of the other users."""
    rows = min(chunk, float(question.context))
    chunk_work = layouts.chunk(rows, question.context - rows)
    decodes = layouts.decode(np.ceil((question.users - 1) / layouts.pp), float(question.context))
    return cycle_seconds(question.setting, layouts, chunk_work + decodes) / question.setting.accepted_tokens
