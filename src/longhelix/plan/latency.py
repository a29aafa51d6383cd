"""Time to first token against time between tokens, over layouts and chunk sizes."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longhelix.perf.layouts import Array
from longhelix.perf.prefill import prefill
from longhelix.plan.service import CHUNKS, Use, mixed_seconds
from longhelix.plan.space import Space


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


def latencies(use: Use, space: Space, users: int) -> Latencies:
    """Cost every layout with every chunk size for one of the longest prompts, which comes beside `users` - 1 others."""
    layouts, setting = space.layouts, use.setting
    shape = (len(layouts), len(CHUNKS))
    ttft_s, tbt_s = np.full(shape, np.inf), np.full(shape, np.inf)
    known = use.longest_prompt * use.prefix_hit
    for column, chunk in enumerate(CHUNKS):
        needed = use.memory_bytes(layouts, float(users), float(chunk))
        fits = np.flatnonzero(needed <= setting.capacity_bytes(layouts))
        if len(fits):
            held = layouts.take(fits)
            alone = prefill(setting, held, use.longest_prompt - known, float(chunk), prefix=known)
            ttft_s[fits, column] = alone.seconds
            tbt_s[fits, column] = mixed_seconds(use, held, users - 1.0, float(chunk))
    return Latencies(ttft_s, tbt_s, layouts.world_size)
