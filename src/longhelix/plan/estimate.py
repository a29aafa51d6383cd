"""One configuration, taken apart: each part of a step, memory, latencies and utilisation."""

from dataclasses import dataclass

import numpy as np

from longhelix.layout import Layout
from longhelix.perf.flops import model_flops
from longhelix.perf.layouts import Layouts
from longhelix.perf.memory import Memory, memory
from longhelix.perf.part import Part
from longhelix.perf.prefill import prefill_seconds
from longhelix.perf.setting import Setting
from longhelix.perf.step import decode_parts
from longhelix.plan.provenance import source


@dataclass(frozen=True)
class EstimatedPart:
    """Per step of one GPU on the critical path; net_bytes are those that it sends."""

    name: str
    seconds: float
    flops: float
    hbm_bytes: float
    net_bytes: float
    source: str


@dataclass(frozen=True)
class Estimate:
    """mfu: of all GPUs' peak arithmetic in the weights' dtype; mbu: of one GPU's peak bandwidth; bytes: the fullest.

    `parts` add up to the TTL.
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
    parts: tuple[EstimatedPart, ...]


def estimate(
    setting: Setting, layout: Layout, *, context: int, batch: int, chunk: int, local: bool = False, hop_b: bool = True
) -> Estimate:
    """Cost one decode step of `batch` requests of `context` tokens, and the prefill of one in chunks of `chunk`.

    Raises UserError for a layout that the model's heads or layers do not allow.
    """
    layout.check(setting.heads, setting.model.num_layers)
    layouts = Layouts.of([layout], local=local, hop_b=hop_b)
    parts = decode_parts(setting, layouts, float(batch), float(context))
    needed = memory(setting, layouts, float(batch), float(context), float(min(chunk, context)))
    ttl_s = sum(float(part.seconds[0]) for part in parts)
    useful_flops = model_flops(setting.model, float(batch), 0.0) + batch * _row_attention_flops(setting, context)
    read_bytes = sum(float(part.hbm_bytes[0]) for part in parts)
    system, gpus = setting.system, layout.world_size
    machines = 1 if system.shared else gpus
    return Estimate(
        layout=layout,
        ttl_s=ttl_s,
        ttft_s=float(prefill_seconds(setting, layouts, float(context), float(min(chunk, context)))[0]),
        tokens_per_s_per_user=1 / ttl_s,
        tokens_per_s_per_gpu=batch / ttl_s / gpus,
        mfu=useful_flops / (machines * system.rate(setting.weight_dtype) * ttl_s),
        mbu=read_bytes / (system.memory_bytes_per_s * float(setting.share(layouts)[0]) * ttl_s),
        memory_bytes_per_gpu=_whole(needed.total_bytes),
        weights_bytes_per_gpu=_whole(needed.weights_bytes),
        kv_bytes_per_gpu=_whole(needed.kv_bytes),
        fits=_fits(setting, layouts, needed),
        parts=tuple(_estimated(setting, part) for part in parts if float(part.seconds[0]) > 0),
    )


def _row_attention_flops(setting: Setting, context: int) -> float:
    return model_flops(setting.model, 1.0, float(context)) - model_flops(setting.model, 1.0, 0.0)


def _whole(value: np.ndarray[tuple[int], np.dtype[np.float64]]) -> int:
    return round(float(value[0]))


def _fits(setting: Setting, layouts: Layouts, needed: Memory) -> bool:
    return float(needed.total_bytes[0]) <= float(setting.capacity_bytes(layouts)[0])


def _estimated(setting: Setting, part: Part) -> EstimatedPart:
    dtype = setting.kv_dtype if part.name == "attention" else setting.weight_dtype
    return EstimatedPart(
        part.name,
        float(part.seconds[0]),
        float(part.flops[0]),
        float(part.hbm_bytes[0]),
        float(part.net_bytes[0]),
        source(setting.system, part, 0, dtype),
    )
