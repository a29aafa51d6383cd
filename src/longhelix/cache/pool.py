"""The paged pool: this rank's bytes of all KV blocks, layer by layer."""

import torch
from torch import Tensor


class KVPool:
    """`k[layer]` and `v[layer]` are (P blocks, D tokens, k local KV heads, C) in `dtype`; contents start undefined."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_tokens: int,
        num_kv_heads_local: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, block_tokens, num_kv_heads_local, head_size)
        self.k: list[Tensor] = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.v: list[Tensor] = [torch.empty(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in (*self.k, *self.v))
