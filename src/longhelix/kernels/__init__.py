"""Local kernels. One op = signature with shapes (ops), reference (the truth), fast forms, fake."""

from longhelix.kernels.direct import can_expand, direct_attention
from longhelix.kernels.experts import Experts, route, run_experts
from longhelix.kernels.layer import KVFormat, KVLayer
from longhelix.kernels.ops import (
    expand_latents,
    linear,
    merge_states,
    partial_attention,
    rotate_and_write,
    take_rows,
    write_kv,
)
from longhelix.kernels.reference import rms_norm, rotate_heads
from longhelix.kernels.weight import Weight, can_pack, make_weight

__all__ = [
    "Experts",
    "KVFormat",
    "KVLayer",
    "Weight",
    "can_expand",
    "can_pack",
    "direct_attention",
    "expand_latents",
    "linear",
    "make_weight",
    "merge_states",
    "partial_attention",
    "rms_norm",
    "rotate_and_write",
    "rotate_heads",
    "route",
    "run_experts",
    "take_rows",
    "write_kv",
]
