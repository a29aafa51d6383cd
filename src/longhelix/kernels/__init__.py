"""Local kernels. One op = signature with shapes (ops), reference (the truth), fast forms, fake."""

from longhelix.kernels.ops import merge_states, partial_attention, write_kv

__all__ = ["merge_states", "partial_attention", "write_kv"]
