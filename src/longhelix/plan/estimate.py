"""One configuration, taken apart: each cost item of a step, memory, latencies and utilisation."""

from dataclasses import dataclass

import numpy as np

from longhelix.layout import Layout
from longhelix.perf.cost_item import CostItem
from longhelix.perf.flops import model_flops
from longhelix.perf.layouts import Layouts
from longhelix.perf.memory import Memory, memory
from longhelix.perf.prefill import prefill_seconds
from longhelix.perf.setting import ACTIVATION_DTYPE, Setting
from longhelix.perf.step import decode_items
from longhelix.plan.provenance import source


@dataclass(frozen=True)
class EstimatedItem:
    """A cost item of a step on one GPU. source: where its seconds come from."""

    name: str
    seconds: float
    flops: float
    hbm_bytes: float
    net_bytes: float
    source: str


@dataclass(frozen=True)
class Estimate:
    """mfu: of all GPUs' peak arithmetic in the weights' dtype, or the experts' where that is faster; mbu: of one GPU's
    peak bandwidth; bytes: the fullest.

    The seconds of `items` add up to the TTL.
    """

    layout: Layout
    ttl_s: float
    ttft_s: float
    tokens_per_s_per_user: float
    tokens_per_s_per_gpu: float
    mfu: float
    mbu: float
    memory_bytes_per_gpu: int
    weights_bytes_per_gpu: int
    kv_bytes_per_gpu: int
    fits: bool
    items: tuple[EstimatedItem, ...]


def estimate(
    setting: Setting, layout: Layout, *, context: int, batch: int, chunk: int, local: bool = False, hop_b: bool = True
) -> Estimate:
    """Cost one decode step of `batch` requests of `context` tokens, and the prefill of one in chunks of `chunk`.

    Raises UserError for a layout that the model's heads or layers do not allow.
    """
    layout.check(setting.heads, setting.model.num_layers)
    layouts = Layouts.of([layout], local=local, hop_b=hop_b)
    items = decode_items(setting, layouts, float(batch), float(context))
    needed = memory(setting, layouts, float(batch), float(context), float(min(chunk, context)))
    ttl_s = sum(float(item.seconds[0]) for item in items)
    useful_flops = model_flops(setting.model, float(batch), 0.0) + batch * _row_attention_flops(setting, context)
    read_bytes = sum(float(item.hbm_bytes[0]) for item in items)
    system, gpus = setting.system, layout.world_size
    peak = max(system.rate(dtype) for dtype in (setting.weight_dtype, setting.experts_in))
    machines = 1 if system.shared else gpus
    return Estimate(
        layout=layout,
        ttl_s=ttl_s,
        ttft_s=float(prefill_seconds(setting, layouts, float(context), float(min(chunk, context)))[0]),
        tokens_per_s_per_user=1 / ttl_s,
        tokens_per_s_per_gpu=batch / ttl_s / gpus,
        mfu=useful_flops / (machines * peak * ttl_s),
        mbu=read_bytes / (system.memory_bytes_per_s * float(setting.share(layouts)[0]) * ttl_s),
        memory_bytes_per_gpu=_whole(needed.total_bytes),
        weights_bytes_per_gpu=_whole(needed.weights_bytes),
        kv_bytes_per_gpu=_whole(needed.kv_bytes),
        fits=_fits(setting, layouts, needed),
        items=tuple(_estimated(setting, item) for item in items if float(item.seconds[0]) > 0),
    )


def _row_attention_flops(setting: Setting, context: int) -> float:
    return model_flops(setting.model, 1.0, float(context)) - model_flops(setting.model, 1.0, 0.0)


def _whole(value: np.ndarray[tuple[int], np.dtype[np.float64]]) -> int:
    return round(float(value[0]))


def _fits(setting: Setting, layouts: Layouts, needed: Memory) -> bool:
    return float(needed.total_bytes[0]) <= float(setting.capacity_bytes(layouts)[0])


def _estimated(setting: Setting, item: CostItem) -> EstimatedItem:
    dtypes = {
        "attention": setting.attends_in,
        "experts": setting.experts_in,
        "indexer": setting.indexes_in,
        "linear attention": ACTIVATION_DTYPE,
    }
    return EstimatedItem(
        item.name,
        float(item.seconds[0]),
        float(item.flops[0]),
        float(item.hbm_bytes[0]),
        float(item.net_bytes[0]),
        source(setting.system, item, 0, dtypes.get(item.name, setting.weight_dtype)),
    )
