"""Communication behind weights: while an all-reduce runs, the next product's weights come into the cache. No preset
counts on it, as no engine is known to do so."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from longhelix.perf.cost_item import CostItem, total_seconds
from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.setting import Setting
from longhelix.perf.step import decode_items

CACHE_BYTES = 126e6  # B200's L2 cache, 126.5 MB, as the driver reports it (pytorch/ao pull request 4002)
# Which product follows which all-reduce. What experts a row takes is not known before its router ran.
_NEXT = {"all-reduce after attention": "dense FFN", "all-reduce after FFN": "QKV"}


def prefetched_seconds(setting: Setting, layouts: Layouts, batch: float | Array, context: float | Array) -> Array:
    """Seconds of a decode step, with less of a product's time where its weights were read before."""
    return total_seconds(prefetched(setting, layouts, decode_items(setting, layouts, batch, context)))


def prefetched(
    setting: Setting, layouts: Layouts, items: Sequence[CostItem], cache_bytes: float = CACHE_BYTES
) -> list[CostItem]:
    """The cost items of a step, over all layers, with those products shortened.

    As many bytes as the cache holds and the all-reduce's time allows. Copies of the FFN (Medha) hide nothing: the
    paper that compares them says so (arXiv 2507.07120, evaluation); requests apart have no all-reduce.
    """
    system = setting.system
    hides = ~layouts.grouped & (layouts.ffn_replicas == 1)
    bytes_per_s = system.memory_bytes_per_s * system.memory_efficiency * setting.share(layouts)
    waits_s = {_NEXT[item.name]: item.seconds for item in items if item.name in _NEXT}
    num_layers, model = layouts.stage_layers(setting.model.num_layers) * layouts.pp, setting.model
    shares = {"QKV": 1.0, "dense FFN": model.num_dense_layers / model.num_layers}  # of the layers that have it

    def shortened(item: CostItem) -> CostItem:
        if item.name not in waits_s:
            return item
        held_s = num_layers * cache_bytes / bytes_per_s
        read_s = item.hbm_bytes / bytes_per_s
        before_s = np.minimum(shares[item.name] * np.minimum(waits_s[item.name], held_s), read_s)
        # What is left to read, or the arithmetic, whichever takes longer.
        busy_s = item.seconds - item.fixed_s
        arithmetic_s = np.where(item.compute_bound, busy_s, 0.0)
        left_s = np.maximum(busy_s - np.where(hides, before_s, 0.0), arithmetic_s)
        return replace(item, seconds=item.fixed_s + left_s)

    return [shortened(item) for item in items]
