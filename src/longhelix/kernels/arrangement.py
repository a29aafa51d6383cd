"""How a layer's keys and values can lie in the pool. An arrangement knows what it holds, and which tensors that takes.

Which number formats it holds, and with which scales, is in `longhelix.spec.formats`, by its name.
"""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from longhelix.kernels import native
from longhelix.kernels.numbers import STORED

if TYPE_CHECKING:
    from longhelix.kernels.layer import KVFormat, KVLayer


class Arrangement(Protocol):
    name: str

    def holds(self, format: "KVFormat", device: torch.device) -> bool:
        """Whether the kernels of `device` can read such a layer."""
        ...

    def new_tensors(self, format: "KVFormat", num_blocks: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Values and scales of a layer of `num_blocks` KV blocks; contents start undefined."""
        ...

    def sizes(self, values: Tensor) -> tuple[int, int]:
        """Tokens of a KV block, and KV heads."""
        ...

    def by_block(self, values: Tensor) -> Tensor:
        """A view with KV blocks outermost."""
        ...


class Rows:
    """A tensor (P, A, D, k, C) of numbers; A is [keys, values], both of C channels, or [keys] alone where values are
    the first channels of the keys (MLA, absorbed). Narrow numbers have float32 scales (P, A, D, k) beside them. GPUs
    and the reference read them."""

    name = "rows"

    def holds(self, format: "KVFormat", device: torch.device) -> bool:
        kv = format.number.kv
        # What is narrow to be fast is not left to the reference kernels of a CPU.
        slow = device.type == "cpu" and TILES.name in kv and kv[TILES.name].bits > 0
        return self.name in kv and not slow and len({*format.vector_sizes}) == 1

    def new_tensors(self, format: "KVFormat", num_blocks: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        arrays, stored = len(format.vector_sizes), STORED[format.dtype]
        shape = num_blocks, arrays, format.block_tokens, format.num_kv_heads, format.key_size
        scales = None if stored.largest is None else torch.empty(shape[:-1], dtype=torch.float32, device=device)
        return torch.empty(shape, dtype=stored.dtype, device=device), scales

    def sizes(self, values: Tensor) -> tuple[int, int]:
        return values.shape[2], values.shape[3]

    def by_block(self, values: Tensor) -> Tensor:
        return values


class Tiles:
    """What the native CPU kernels read ("packed"): bytes (k, P, D / 16, X). A tile of 16 tokens is the keys as
    [channel][token], then the values as [16 channels][token][channel], numbers of 16 bits and less in pairs of
    neighbouring channels (keys) or tokens (values), so that sixteen scores, or sixteen channels of output, come from
    one load without sums across lanes; then a bfloat16 scale for each token's key, and one for its value, where numbers
    are narrow."""

    name = "tiles"

    def holds(self, format: "KVFormat", device: torch.device) -> bool:
        known = native.module is not None and device.type == "cpu" and self.name in format.number.kv
        whole = not any(size % native.LANES for size in (format.block_tokens, format.key_size, format.value_size))
        return known and whole and not (format.shared_values and format.number.kv[self.name].bits)

    def new_tensors(self, format: "KVFormat", num_blocks: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        tiles = format.block_tokens // native.LANES
        tile_bytes = format.block_bytes // (format.num_kv_heads * tiles)
        shape = format.num_kv_heads, num_blocks, tiles, tile_bytes
        return torch.empty(shape, dtype=torch.uint8, device=device), None

    def sizes(self, values: Tensor) -> tuple[int, int]:
        return values.shape[2] * native.LANES, values.shape[0]

    def by_block(self, values: Tensor) -> Tensor:
        return values.transpose(0, 1)

    def handle(self, layer: "KVLayer"):
        """The layer as the native kernels know it."""
        format = layer.format
        number = getattr(native.module.Number, format.dtype)
        num_blocks, tiles = layer.values.shape[1:3]
        sizes = format.num_kv_heads, num_blocks, tiles, format.key_size, format.value_size, format.shared_values
        return native.module.Pool(layer.values.data_ptr(), number, *sizes)


ROWS, TILES = Rows(), Tiles()
ARRANGEMENTS: dict[str, Arrangement] = {TILES.name: TILES, ROWS.name: ROWS}  # the faster first
