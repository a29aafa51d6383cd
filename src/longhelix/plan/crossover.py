"""Where sharding the KV along the sequence starts to pay, by context and batch."""

from dataclasses import dataclass

import numpy as np

from longhelix.perf.memory import memory
from longhelix.perf.step import token_seconds
from longhelix.plan.candidate import degrees
from longhelix.plan.question import Question
from longhelix.plan.space import HELIX, STRATEGIES, Space

CONTEXTS = tuple(4096 * 4**power for power in range(6))
BATCHES = (1, 8, 64, 512)


@dataclass(frozen=True)
class Crossover:
    """The best TTL with Helix and with every other strategy, at one context and batch. None: no layout fits."""

    gpus: int  # of every layout that is compared
    context: int
    batch: int
    helix_s: float | None
    others_s: float | None
    kvp: int | None  # of Helix's best layout

    @property
    def pays(self) -> bool:
        return self.helix_s is not None and (self.others_s is None or self.helix_s < self.others_s)


def crossovers(question: Question, searched: Space, max_gpus: int) -> list[Crossover]:
    """Compare the best TTL with and without KVP at each context and batch.

    All layouts compared have as many GPUs as the largest layout of up to `max_gpus` GPUs. That can be fewer than
    `max_gpus`: no layout has 3 GPUs where sizes are powers of two.
    """
    sizes = searched.layouts.world_size
    gpus = sizes[sizes <= max_gpus].max()
    on_all = np.flatnonzero(sizes == gpus)
    layouts = searched.layouts.take(on_all)
    helix = np.isin(searched.strategy[on_all], [i for i, each in enumerate(STRATEGIES) if each.name in HELIX])
    found = []
    for context in CONTEXTS:
        for batch in BATCHES:
            needed = memory(question.setting, layouts, float(batch), float(context)).total_bytes
            ttl_s = token_seconds(question.setting, layouts, float(batch), float(context))
            ttl_s = np.where(needed <= question.setting.capacity_bytes(layouts), ttl_s, np.inf)
            ours, others = np.where(helix, ttl_s, np.inf), np.where(helix, np.inf, ttl_s)
            best = int(np.argmin(ours))
            fits = bool(np.isfinite(ours[best]))
            found.append(
                Crossover(
                    int(gpus),
                    context,
                    batch,
                    float(ours[best]) if fits else None,
                    float(others.min()) if np.isfinite(others.min()) else None,
                    int(degrees(searched.layouts, int(on_all[best]))["kvp"]) if fits else None,
                )
            )
    return found
