"""Estimate one configuration in detail: the cost items of a step, memory, latencies and utilisation."""

from dataclasses import dataclass

import numpy as np

from longhelix.perf.cost_item import CostItem
from longhelix.perf.flops import model_flops
from longhelix.perf.layouts import Layouts
from longhelix.perf.memory import windows_bytes
from longhelix.perf.setting import ACTIVATION_DTYPE, Setting
from longhelix.perf.step import decode_items
from longhelix.plan.candidate import degrees
from longhelix.plan.deployment import check_experts
from longhelix.plan.provenance import source
from longhelix.plan.service import ServiceLoad, service
from longhelix.spec.layout import Layout


@dataclass(frozen=True)
class EstimatedItem:
    """A cost item of a step on one GPU."""

    name: str
    seconds: float
    flops: float
    hbm_bytes: float
    net_bytes: float
    source: str  # what determines the seconds: a constant, or a limit of the roofline


@dataclass(frozen=True)
class Estimate:
    """The predicted costs of one replica. A field with the same name as a field of `Choice` has the same meaning."""

    layout: dict[str, int | str]
    gpus: int
    batch: int
    chunk_tokens: int
    draft_tokens: int
    accepted_tokens: float
    step_s: float  # time of a decode step: the sum of `items`. TTL = step_s / accepted_tokens.
    ttl_s: float
    ttl_p95_s: float
    ttft_s: float
    tokens_per_s_per_user: float
    tokens_per_s_per_gpu: float
    mfu: float  # fraction of the peak FLOP/s of all GPUs, in the faster of the weight and expert dtypes
    mbu: float  # fraction of one GPU's peak memory bandwidth
    memory_bytes_per_gpu: int  # fields in bytes refer to the GPU with the highest memory use
    weights_bytes_per_gpu: int
    kv_bytes_per_gpu: int
    windows_bytes_per_gpu: int  # of these bytes, the KV of layers with a window
    headroom_bytes: int
    fits: bool
    items: tuple[EstimatedItem, ...]


def estimate(
    setting: Setting,
    layout: Layout,
    *,
    context: int,
    batch: int,
    chunk: int,
    dp: int = 1,
    local: bool = False,
    hop_b: bool = True,
) -> Estimate:
    """Estimate one decode step of a batch, and the prefill of an additional request while the batch decodes.

    Args:
        layout: layout of all `dp` groups together.
        context: tokens per request.
        batch: number of decoding requests.
        chunk: prompt tokens per step.
        local: True if each KVP rank is a separate group with its own requests.

    Raises:
        UserError: the layout does not fit the model's heads, layers or experts.
    """
    setting.model.check(layout)
    check_experts(setting.model, layout.ep)
    layouts, use = Layouts.of([layout], dp=dp, local=local, hop_b=hop_b), ServiceLoad(setting, context)
    items = decode_items(setting, layouts, float(batch), float(context))
    needed = use.memory(layouts, float(batch), float(chunk))
    given = service(use, layouts, np.array([float(batch)]), np.array([float(chunk)]))
    step_s, ttl_s = sum(float(item.seconds[0]) for item in items), float(given.ttl_s[0])
    useful_flops = model_flops(setting.model, float(batch), 0.0) + batch * _row_attention_flops(setting, context)
    read_bytes = sum(float(item.hbm_bytes[0]) for item in items)
    system, gpus = setting.system, layout.world_size
    peak = max(system.rate(dtype) for dtype in (setting.weights_in, setting.experts_in))
    free_bytes = float(setting.capacity_bytes(layouts)[0]) - float(needed.total_bytes[0])
    machines = 1 if system.shared else gpus
    return Estimate(
        layout=degrees(layouts, 0),
        gpus=gpus,
        batch=batch,
        chunk_tokens=chunk,
        draft_tokens=setting.drafts.tokens,
        accepted_tokens=setting.drafts.accepted,
        step_s=step_s,
        ttl_s=ttl_s,
        ttl_p95_s=float(given.ttl_p95_s[0]),
        ttft_s=float(given.ttft_s[0]),
        tokens_per_s_per_user=1 / ttl_s,
        tokens_per_s_per_gpu=batch / ttl_s / gpus,
        mfu=useful_flops / (machines * peak * ttl_s),
        mbu=read_bytes / (system.memory.bytes_per_s * float(setting.share(layouts)[0]) * step_s),
        memory_bytes_per_gpu=int(needed.total_bytes[0]),
        weights_bytes_per_gpu=int(needed.weights_bytes[0]),
        kv_bytes_per_gpu=int(needed.kv_bytes[0]),
        windows_bytes_per_gpu=int(windows_bytes(setting, layouts, float(batch), float(context))[0]),
        headroom_bytes=int(free_bytes),
        fits=free_bytes >= 0,
        items=tuple(_estimated(setting, item) for item in items if float(item.seconds[0]) > 0),
    )


def _row_attention_flops(setting: Setting, context: int) -> float:
    return model_flops(setting.model, 1.0, float(context)) - model_flops(setting.model, 1.0, 0.0)


def _estimated(setting: Setting, item: CostItem) -> EstimatedItem:
    dtypes = {
        "attention": setting.attends_in,
        "experts": setting.experts_in,
        "indexer": setting.indexes_in,
        "linear attention": ACTIVATION_DTYPE,
    }
    return EstimatedItem(
        name=item.name,
        seconds=float(item.seconds[0]),
        flops=float(item.flops[0]),
        hbm_bytes=float(item.hbm_bytes[0]),
        net_bytes=float(item.net_bytes[0]),
        source=source(setting.system, item, 0, dtypes.get(item.name, setting.weights_in)),
    )
