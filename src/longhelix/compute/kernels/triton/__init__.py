"""GPU forms of the ops, in Triton.

A pool is one tensor per layer, `kv_PADkC`: A is [keys, values], or [keys] alone where values are the first channels of
the keys (MLA, absorbed). A pool of 8 bits has `scales_PADk`, float32: value = stored * scale. One of nvfp4 has bytes
of codes and of scales (`numbers.Nvfp4`).
"""

from longhelix.compute.kernels.triton.attention import partial_attention
from longhelix.compute.kernels.triton.experts import run_experts
from longhelix.compute.kernels.triton.merge import merge_states
from longhelix.compute.kernels.triton.packed_products import multiply_packed
from longhelix.compute.kernels.triton.rows import activate_rows, norm_rows, rotate
from longhelix.compute.kernels.triton.write import write_kv

# Number formats of rows that these kernels read and write.
FORMATS = ("float32", "bfloat16", "float16", "fp8", "int8", "nvfp4")

__all__ = [
    "FORMATS",
    "activate_rows",
    "merge_states",
    "multiply_packed",
    "norm_rows",
    "partial_attention",
    "rotate",
    "run_experts",
    "write_kv",
]
