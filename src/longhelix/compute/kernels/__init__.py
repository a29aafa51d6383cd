"""Local kernels. One op = signature with shapes, reference (the truth), fast forms, fake."""

from longhelix.compute.kernels.attention import merge_states, partial_attention
from longhelix.compute.kernels.direct import can_expand, direct_attention, expand_latents
from longhelix.compute.kernels.experts import Experts, route, run_experts
from longhelix.compute.kernels.layer import ROWS, TILES, KVFormat, KVLayer
from longhelix.compute.kernels.products import linear, quantise_rows, take_rows
from longhelix.compute.kernels.reference import rms_norm, rotate_heads
from longhelix.compute.kernels.weight import PANELS, PLAIN, Weight, make_weight
from longhelix.compute.kernels.write import rotate_and_write, write_kv

__all__ = [
    "PANELS",
    "PLAIN",
    "ROWS",
    "TILES",
    "Experts",
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
    "quantise_rows",
    "rms_norm",
    "rotate_and_write",
    "rotate_heads",
    "route",
    "run_experts",
    "take_rows",
    "write_kv",
]
