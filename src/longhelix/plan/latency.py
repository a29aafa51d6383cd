"""Estimate the TTFT of a prompt, and the TTL of other requests during its prefill, by layout and chunk size."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longhelix.perf.layouts import Array
from longhelix.perf.prefill import prefill
from longhelix.plan.service import CHUNKS, ServiceLoad, mixed_seconds
from longhelix.plan.space import Space


@dataclass(frozen=True)
class Latencies:
    """TTFT and TTL for L layouts and C chunk sizes. Both are infinite if the requests do not fit in memory."""

    ttft_s: Array  # (L, C): TTFT of one of the longest prompts
    tbt_s: Array  # (L, C): TTL of the other requests during the prefill of this prompt
    gpus: Array  # (L,)

    def best_s(self, tbt_s: float | None) -> Array:
        """Return each layout's lowest TTFT over the chunk sizes that meet the TTL target, (L,)."""
        kept = self.ttft_s if tbt_s is None else np.where(self.tbt_s <= tbt_s, self.ttft_s, np.inf)
        return np.asarray(kept.min(axis=1))

    def frontier(self) -> NDArray[np.intp]:
        """Return flat indices of the Pareto frontier of TTFT and TTL, in ascending order of TTL."""
        ttft_s, tbt_s = self.ttft_s.ravel(), self.tbt_s.ravel()
        order = np.lexsort((np.broadcast_to(self.gpus[:, None], self.ttft_s.shape).ravel(), ttft_s, tbt_s))
        order = order[np.isfinite(ttft_s[order])]
        best = np.minimum.accumulate(ttft_s[order])
        falls = np.concatenate([[True], best[1:] < best[:-1]]) if len(order) else np.zeros(0, dtype=np.bool_)
        return np.asarray(order[falls])

    def fewest_gpus(self, ttft_s: float, tbt_s: float) -> int | None:
        """Return the flat index of the configuration with the fewest GPUs that meets both targets.

        On a tie, return the configuration with the shortest TTFT. Returns None if no configuration meets both targets.
        """
        keeps = (self.ttft_s <= ttft_s) & (self.tbt_s <= tbt_s)
        if not keeps.any():
            return None
        gpus = np.where(keeps, self.gpus[:, None], np.inf)
        return int(np.lexsort((self.ttft_s.ravel(), gpus.ravel()))[0])


def latencies(use: ServiceLoad, space: Space, users: int) -> Latencies:
    """Estimate the prefill of one of the longest prompts for all layouts and chunk sizes.

    During the prefill, `users` - 1 other requests decode.
    """
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
