"""How one layer's keys and values lie in the pool.

*rows*: a tensor (P, A, D, k, C) of the KV dtype; A is [keys, values], or [keys] alone where values are the first
channels of the keys (MLA, absorbed). 8-bit numbers have float32 scales (P, A, D, k) beside them.

*packed*: what the native CPU kernels read, bytes (k, P, D / 16, X). A tile of 16 tokens is the keys as
[channel][token], then the values as [16 channels][token][channel], numbers of 16 bits and less in pairs of neighbouring
channels (keys) or tokens (values), so that sixteen scores, or sixteen channels of output, come from one load without
sums across lanes; then a bfloat16 scale for each token's key, and one for its value, where numbers are narrow.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from longhelix.errors import UserError
from longhelix.kernels import native

NARROW = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": None}


@dataclass(frozen=True)
class KVFormat:
    """Shape and arrangement of a layer's pool; `dtype` is a torch dtype's name, or one of NARROW."""

    dtype: str
    block_tokens: int
    num_kv_heads: int
    key_size: int
    value_size: int
    packed: bool
    shared_values: bool = False

    @classmethod
    def choose(
        cls,
        dtype: str,
        block_tokens: int,
        num_kv_heads: int,
        key_size: int,
        value_size: int,
        device: torch.device,
        shared_values: bool = False,
    ) -> "KVFormat":
        """Packed where the native kernels can read it, else rows. Raises UserError if neither holds `dtype`."""
        lanes = native.LANES
        packed = native.module is not None and device.type == "cpu" and num_kv_heads > 0
        packed = packed and not (block_tokens % lanes or key_size % lanes or value_size % lanes)
        packed = packed and not (shared_values and dtype in NARROW)
        if dtype in NARROW and not packed and (device.type == "cpu" or dtype == "int4") and num_kv_heads:
            raise UserError(
                f"kv_dtype {dtype} needs the native CPU kernels, KV blocks of a multiple of {lanes} tokens and head "
                f"sizes of a multiple of {lanes}: set kv_dtype to bfloat16"
            )
        return cls(dtype, block_tokens, num_kv_heads, key_size, value_size, packed, shared_values)

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block: numbers, and the scales of narrow ones."""
        channels = self.key_size + (0 if self.shared_values else self.value_size)
        arrays = 1 if self.shared_values else 2
        bits = 4 if self.dtype == "int4" else 8 * self.torch_dtype.itemsize
        scale_bytes = 0 if self.dtype not in NARROW else 2 if self.packed else 4
        return self.block_tokens * self.num_kv_heads * (channels * bits // 8 + arrays * scale_bytes)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of a number in rows."""
        return NARROW[self.dtype] if self.dtype in NARROW else getattr(torch, self.dtype)

    def new_layer(self, num_blocks: int, device: torch.device) -> "KVLayer":
        """A layer of `num_blocks` KV blocks; contents start undefined."""
        if self.packed:
            tiles = self.block_tokens // native.LANES
            tile_bytes = self.block_bytes // (self.num_kv_heads * tiles)
            values = torch.empty(self.num_kv_heads, num_blocks, tiles, tile_bytes, dtype=torch.uint8, device=device)
            return KVLayer(self, values, None)
        arrays = 1 if self.shared_values else 2
        shape = (num_blocks, arrays, self.block_tokens, self.num_kv_heads, self.key_size)
        scales = torch.empty(shape[:-1], dtype=torch.float32, device=device) if self.dtype in NARROW else None
        return KVLayer(self, torch.empty(shape, dtype=self.torch_dtype, device=device), scales)


@dataclass(frozen=True, eq=False)
class KVLayer:
    """One layer's pool."""

    format: KVFormat
    values: Tensor
    scales: Tensor | None

    @cached_property
    def handle(self):
        """The packed pool as the native kernels know it."""
        format = self.format
        number = getattr(native.module.Number, format.dtype)
        num_blocks, tiles = self.values.shape[1:3]
        sizes = (format.num_kv_heads, num_blocks, tiles, format.key_size, format.value_size, format.shared_values)
        return native.module.Pool(self.values.data_ptr(), number, *sizes)

    @property
    def by_block(self) -> tuple[Tensor, ...]:
        """All of the layer as bytes, uint8 views of which the first dim counts KV blocks."""
        if self.format.packed:
            return (self.values.movedim(1, 0),)
        return tuple(values.view(torch.uint8) for values in (self.values, self.scales) if values is not None)

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """k_PDkC, v_PDkC as views of an unquantised pool in rows."""
        if self.format.packed or self.scales is not None:
            raise ValueError(f"only unquantised rows can be seen as tensors, not {self.format}")
        keys_PDkC = self.values[:, 0]
        return keys_PDkC, keys_PDkC[..., : self.format.value_size] if self.format.shared_values else self.values[:, 1]
