"""Find the contexts and batch sizes at which Helix is faster than every other strategy."""

from dataclasses import dataclass

import numpy as np

from longhelix.perf.memory import memory
from longhelix.perf.step import token_seconds
from longhelix.plan.candidate import degrees
from longhelix.plan.question import Question
from longhelix.plan.space import HELIX, STRATEGIES, Space

CONTEXTS = tuple(4096 * 4**power for power in range(6))  # tokens
BATCHES = (1, 8, 64, 512)


@dataclass(frozen=True)
class Crossover:
    """The best TTL with Helix and with the other strategies, at one context and batch size."""

    gpus: int  # number of GPUs of each compared layout
    context: int  # tokens per request
    batch: int  # number of requests
    helix_s: float | None  # best TTL with Helix, in seconds; None if no layout fits
    others_s: float | None  # best TTL with the other strategies, in seconds; None if no layout fits
    kvp: int | None  # KVP of Helix's best layout; None if no layout fits

    @property
    def pays(self) -> bool:
        """True if Helix is faster than all other strategies, or if only Helix fits."""
        return self.helix_s is not None and (self.others_s is None or self.helix_s < self.others_s)


def crossovers(question: Question, searched: Space, max_gpus: int) -> list[Crossover]:
    """Compare the best TTL of Helix and of the other strategies at each context and batch size.

    All compared layouts have the same number of GPUs. It is the largest number up to `max_gpus` for which the space
    has a layout. For example, if all sizes are powers of two and `max_gpus` is 3, the layouts have 2 GPUs.
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
                    gpus=int(gpus),
                    context=context,
                    batch=batch,
                    helix_s=float(ours[best]) if fits else None,
                    others_s=float(others.min()) if np.isfinite(others.min()) else None,
                    kvp=int(degrees(searched.layouts, int(on_all[best]))["kvp"]) if fits else None,
                )
            )
    return found
