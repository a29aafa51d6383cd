"""Model a prefetch: during an all-reduce, the weights of the next matrix product are read into the L2 cache.

The presets do not assume this prefetch, because we know of no engine that implements it.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from longhelix.perf.cost_item import CostItem, total_seconds
from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.setting import Setting
from longhelix.perf.step import decode_items

CACHE_BYTES = 126e6  # L2 cache of a B200. The driver reports 126.5 MB (pytorch/ao pull request 4002)
# The product after each all-reduce. Expert weights cannot be prefetched, because the router has not yet run.
_NEXT = {"all-reduce after attention": "dense FFN", "all-reduce after FFN": "QKV"}


def prefetched_seconds(setting: Setting, layouts: Layouts, batch: float | Array, context: float | Array) -> Array:
    """Return the seconds of a decode step in which weights are prefetched during all-reduces."""
    return total_seconds(prefetched(setting, layouts, decode_items(setting, layouts, batch, context)))


def prefetched(
    setting: Setting, layouts: Layouts, items: Sequence[CostItem], cache_bytes: float = CACHE_BYTES
) -> list[CostItem]:
    """Shorten each product after an all-reduce by the time that the prefetch of its weights saves.

    The cache size and the time of the all-reduce limit the number of prefetched bytes. Layouts with copies of the FFN
    (Medha) do not prefetch, as in the evaluation of arXiv 2507.07120. Layouts with data-parallel attention do not
    prefetch, because they have no all-reduce.

    Args:
        items: cost items of the step, over all layers.
    """
    system = setting.system
    hides = ~layouts.grouped & (layouts.ffn_replicas == 1)
    bytes_per_s = system.memory.bytes_per_s * system.memory.efficiency * setting.share(layouts)
    waits_s = {_NEXT[item.name]: item.seconds for item in items if item.name in _NEXT}
    num_layers, model = layouts.stage_layers(setting.model.num_layers) * layouts.pp, setting.model
    # Fraction of the layers that contain the product.
    shares = {"QKV": 1.0, "dense FFN": sum(layer.moe is None for layer in model.layers) / model.num_layers}

    def shortened(item: CostItem) -> CostItem:
        if item.name not in waits_s:
            return item
        held_s = num_layers * cache_bytes / bytes_per_s
        read_s = item.hbm_bytes / bytes_per_s
        before_s = np.minimum(shares[item.name] * np.minimum(waits_s[item.name], held_s), read_s)
        # The product takes the time of the remaining reads or of the arithmetic, whichever is longer.
        busy_s = item.seconds - item.fixed_s
        arithmetic_s = np.where(item.compute_bound, busy_s, 0.0)
        left_s = np.maximum(busy_s - np.where(hides, before_s, 0.0), arithmetic_s)
        return replace(item, seconds=item.fixed_s + left_s)

    return [shortened(item) for item in items]
