"""Local kernels. One op = signature with shapes (ops), reference (the truth), fast forms, fake."""

from longhelix.kernels.direct import can_expand, direct_attention
from longhelix.kernels.layer import KVFormat, KVLayer
from longhelix.kernels.ops import (
    expand_latents,
    linear,
    merge_states,
    partial_attention,
    rotate_and_write,
    write_kv,
)
from longhelix.kernels.reference import rms_norm, rotate_heads
from longhelix.kernels.weight import Weight, make_weight

__all__ = [
    "KVFormat",
    "KVLayer",
    "Weight",
    "can_expand",
    "direct_attention",
    "expand_latents",
    "linear",
    "make_weight",
    "merge_states",
    "partial_attention",
    "rms_norm",
    "rotate_and_write",
    "rotate_heads",
    "write_kv",
]
