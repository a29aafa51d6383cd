"""KV of one layer: its slice of the pool, and how keys and values lie in it."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from longhelix.compute.kernels import native
from longhelix.compute.kernels.numbers import SCALE_DTYPES, STORED
from longhelix.errors import UserError
from longhelix.spec import FORMATS, NumberFormat, Scales


class KVArrangement(Protocol):
    """How keys and values lie in memory."""

    name: str

    def holds(self, format: "KVFormat", device: torch.device) -> bool:
        """Return whether the kernels of `device` can read layers of this format."""
        ...

    def new_tensors(self, format: "KVFormat", num_blocks: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Return values and scales of a layer with `num_blocks` KV blocks. Contents start undefined."""
        ...

    def sizes(self, values: Tensor) -> tuple[int, int]:
        """Return the tokens of a KV block, and the KV heads."""
        ...

    def by_block(self, values: Tensor) -> Tensor:
        """Return a view with KV blocks outermost."""
        ...


class Rows:
    """A tensor (P, A, D, k, C) of numbers, for GPUs and the reference kernels.

    A is [keys, values], both with C channels, or [keys] if values are the first channels of the keys (absorbed MLA).
    Numbers of fewer than 8 bits share elements. Narrow numbers have a tensor of scales: (P, A, D, k), or (P, A, D, k,
    G) if scale blocks are parts of a vector, or (P, A, D, k, G + 1) of bytes if the vector has one more scale.
    """

    name = "rows"

    def holds(self, format: "KVFormat", device: torch.device) -> bool:
        kv = format.number.kv
        # Narrow numbers are meant to be fast, so the slow reference kernels of a CPU do not read them.
        slow = device.type == "cpu" and TILES.name in kv and kv[TILES.name].bits > 0
        if self.name not in kv or slow:
            return False
        numbers = kv[self.name].numbers
        return numbers is None or not any(size % numbers for size in (format.key_size, format.value_size))

    def new_tensors(self, format: "KVFormat", num_blocks: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        dtype, scales = STORED[format.dtype].dtype, format.scales
        vectors = num_blocks, len(format.vector_sizes), format.block_tokens, format.num_kv_heads
        elements = format.key_size * format.number.bits // (8 * dtype.itemsize)
        values = torch.empty(*vectors, elements, dtype=dtype, device=device)
        if not scales.bits:
            return values, None
        shape = *vectors, *format.scales_per_vector
        scale_dtype = torch.uint8 if scales.vector_bits else SCALE_DTYPES[scales.scale_bits]
        return values, torch.empty(shape, dtype=scale_dtype, device=device)

    def sizes(self, values: Tensor) -> tuple[int, int]:
        return values.shape[2], values.shape[3]

    def by_block(self, values: Tensor) -> Tensor:
        return values


class Tiles:
    """Bytes (k, P, D / 16, X) for the native CPU kernels ("packed").

    A tile of 16 tokens has the keys as [channel][token], then the values as [16 channels][token][channel]. So one load
    gives sixteen scores or sixteen output channels, without sums across lanes. Numbers of 16 bits and less are stored
    in pairs of neighbouring channels (keys) or tokens (values), integers in fours. Narrow numbers are followed by a
    bfloat16 scale for each token's key, then one for its value. csrc/nvfp4.hpp describes the tiles of nvfp4.
    """

    name = "tiles"

    def holds(self, format: "KVFormat", device: torch.device) -> bool:
        known = native.module is not None and device.type == "cpu" and self.name in format.number.kv
        whole = not any(size % native.LANES for size in (format.block_tokens, format.key_size, format.value_size))
        if not known or not whole:
            return False
        scales = format.number.kv[self.name]
        # Values are made from shared keys as numbers without scales: kernels expand scale blocks to such numbers.
        return not format.shared_values or not scales.bits or scales.numbers is not None

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
        """Return the layer in the form that native kernels take."""
        format = layer.format
        number = getattr(native.module.Number, format.dtype)
        num_blocks, tiles = layer.values.shape[1:3]
        sizes = format.num_kv_heads, num_blocks, tiles, format.key_size, format.value_size, format.shared_values
        return native.module.Pool(layer.values.data_ptr(), number, *sizes, format.rounded)


ROWS, TILES = Rows(), Tiles()
ARRANGEMENTS: dict[str, KVArrangement] = {TILES.name: TILES, ROWS.name: ROWS}  # the faster first


@dataclass(frozen=True)
class KVFormat:
    """Sizes, number format and arrangement of a layer's keys and values."""

    dtype: str  # name of a number format
    block_tokens: int
    num_kv_heads: int
    key_size: int
    value_size: int
    arrangement: KVArrangement
    shared_values: bool = False  # values are the first channels of the keys
    rounded: bool = False  # kernels that multiply integers may round queries and softmax weights to bytes

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
        rounded: bool = False,
    ) -> "KVFormat":
        """Return the format in the first arrangement that `device` supports. Raises UserError if there is none."""
        make = partial(
            cls,
            block_tokens=block_tokens,
            num_kv_heads=num_kv_heads,
            key_size=key_size,
            value_size=value_size,
            shared_values=shared_values,
            rounded=rounded,
        )
        if not num_kv_heads:  # nothing is kept
            return make(dtype="bfloat16", arrangement=ROWS)
        formats = (make(dtype=dtype, arrangement=arrangement) for arrangement in ARRANGEMENTS.values())
        format = next((format for format in formats if format.arrangement.holds(format, device)), None)
        if format is None:
            lanes = native.LANES
            sizes = f"head sizes of a multiple of {lanes}"
            if device.type == "cpu" or ROWS.name not in FORMATS[dtype].kv:
                sizes = f"the native CPU kernels, KV blocks of a multiple of {lanes} tokens and {sizes}"
            raise UserError(f"kv_dtype {dtype} needs {sizes}: set kv_dtype to bfloat16")
        return format

    @property
    def number(self) -> NumberFormat:
        return FORMATS[self.dtype]

    @property
    def scales(self) -> Scales:
        """The scales of the numbers."""
        return self.number.kv[self.arrangement.name]

    @property
    def scales_per_vector(self) -> tuple[int, ...]:
        """(G,), the number of scales of a vector. Empty if all of its channels share one scale."""
        scales = self.scales
        return () if scales.numbers is None else (scales.num_blocks(self.key_size) + (scales.vector_bits > 0),)

    @property
    def rotates_keys(self) -> bool:
        """Whether keys and queries are rotated (`numbers.rotated_channels`)."""
        return self.number.rotates_keys and not self.shared_values

    @property
    def vector_sizes(self) -> tuple[int, ...]:
        """Channels of each vector that is stored for one token and head."""
        return (self.key_size,) if self.shared_values else (self.key_size, self.value_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block: numbers and scales."""
        bits = sum(self.number.vector_bits(size, self.scales) for size in self.vector_sizes)
        return self.block_tokens * self.num_kv_heads * bits // 8

    def new_layer(self, num_blocks: int, device: torch.device) -> "KVLayer":
        """Return a layer with `num_blocks` KV blocks. Contents start undefined."""
        return KVLayer(self, *self.arrangement.new_tensors(self, num_blocks, device))


@dataclass(frozen=True, eq=False)
class KVLayer:
    """One cache entry of one layer: its slice of the pool."""

    format: KVFormat
    values: Tensor
    scales: Tensor | None

    @cached_property
    def handle(self):
        """The layer in the form that native kernels take. Only for tiles."""
        return self.format.arrangement.handle(self)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,) if self.scales is None else (self.values, self.scales)

    @property
    def by_block(self) -> tuple[Tensor, ...]:
        """The whole layer as bytes: uint8 views of its tensors. The first dim is the KV block."""
        return tuple(self.format.arrangement.by_block(tensor).view(torch.uint8) for tensor in self.tensors)

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """Return k_PDkC and v_PDkC as views. Only for rows without scales."""
        if self.format.arrangement is not ROWS or self.scales is not None:
            raise ValueError(f"only unquantised rows can be seen as tensors, not {self.format}")
        keys_PDkC = self.values[:, 0]
        return keys_PDkC, keys_PDkC[..., : self.format.value_size] if self.format.shared_values else self.values[:, 1]

    def decoded(self, blocks_J: Tensor) -> tuple[Tensor, Tensor]:
        """Return k_JDkC and v_JDkC of some KV blocks. float32 if they have scales. Only for rows."""
        scales = None if self.scales is None else self.scales[blocks_J]
        stored, numbers_per_scale = STORED[self.format.dtype], self.format.scales.numbers
        numbers_JADkC = stored.decode(self.values[blocks_J], scales, numbers_per_scale)
        keys_JDkC = numbers_JADkC[:, 0]
        return keys_JDkC, keys_JDkC[..., : self.format.value_size] if self.format.shared_values else numbers_JADkC[:, 1]
