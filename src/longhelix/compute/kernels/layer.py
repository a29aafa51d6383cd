"""One layer's slice of the pool, and its format."""

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
    the first channels of the keys (MLA, absorbed). Numbers of fewer than 8 bits share elements. Narrow numbers have
    scales beside them: (P, A, D, k), or (P, A, D, k, G) where scale blocks are parts of a vector. GPUs and the
    reference read them."""

    name = "rows"

    def holds(self, format: "KVFormat", device: torch.device) -> bool:
        kv = format.number.kv
        # What is narrow to be fast is not left to the reference kernels of a CPU.
        slow = device.type == "cpu" and TILES.name in kv and kv[TILES.name].bits > 0
        return self.name in kv and not slow

    def new_tensors(self, format: "KVFormat", num_blocks: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        dtype, scales = STORED[format.dtype].dtype, format.scales
        vectors = num_blocks, len(format.vector_sizes), format.block_tokens, format.num_kv_heads
        elements = format.key_size * format.number.bits // (8 * dtype.itemsize)
        values = torch.empty(*vectors, elements, dtype=dtype, device=device)
        if not scales.bits:
            return values, None
        shape = *vectors, *format.scales_per_vector
        return values, torch.empty(shape, dtype=SCALE_DTYPES[scales.scale_bits], device=device)

    def sizes(self, values: Tensor) -> tuple[int, int]:
        return values.shape[2], values.shape[3]

    def by_block(self, values: Tensor) -> Tensor:
        return values


class Tiles:
    """What the native CPU kernels read ("packed"): bytes (k, P, D / 16, X). A tile of 16 tokens is the keys as
    [channel][token], then the values as [16 channels][token][channel], so that sixteen scores, or sixteen channels of
    output, come from one load without sums across lanes. Numbers of 16 bits and less lie in pairs of neighbouring
    channels (keys) or tokens (values), integers in fours. Where numbers are narrow, a bfloat16 scale for each token's
    key comes last, and one for its value."""

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
        return native.module.Pool(layer.values.data_ptr(), number, *sizes, format.rounded)


ROWS, TILES = Rows(), Tiles()
ARRANGEMENTS: dict[str, KVArrangement] = {TILES.name: TILES, ROWS.name: ROWS}  # the faster first


@dataclass(frozen=True)
class KVFormat:
    """Sizes, numbers and arrangement of a layer's keys and values; `dtype` is a number format's name. `rounded`:
    attention may round queries and softmax weights to bytes, where the kernels multiply integers."""

    dtype: str
    block_tokens: int
    num_kv_heads: int
    key_size: int
    value_size: int
    arrangement: KVArrangement
    shared_values: bool = False
    rounded: bool = False

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
        """In the first arrangement that holds it on `device`. Raises UserError if none does."""
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
            raise UserError(
                f"kv_dtype {dtype} needs the native CPU kernels, KV blocks of a multiple of {lanes} tokens and head "
                f"sizes of a multiple of {lanes}: set kv_dtype to bfloat16"
            )
        return format

    @property
    def number(self) -> NumberFormat:
        return FORMATS[self.dtype]

    @property
    def scales(self) -> Scales:
        """The scales of its numbers."""
        return self.number.kv[self.arrangement.name]

    @property
    def scales_per_vector(self) -> tuple[int, ...]:
        """(G,), the scale blocks of a vector; empty if all of its channels share one scale."""
        numbers = self.scales.numbers
        return () if numbers is None else (-(-self.key_size // numbers),)

    @property
    def vector_sizes(self) -> tuple[int, ...]:
        """Channels of what is kept of one token and head."""
        return (self.key_size,) if self.shared_values else (self.key_size, self.value_size)

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block: numbers, and the scales of narrow ones."""
        bits = sum(self.number.vector_bits(size, self.scales) for size in self.vector_sizes)
        return self.block_tokens * self.num_kv_heads * bits // 8

    def new_layer(self, num_blocks: int, device: torch.device) -> "KVLayer":
        """A layer of `num_blocks` KV blocks; contents start undefined."""
        return KVLayer(self, *self.arrangement.new_tensors(self, num_blocks, device))


@dataclass(frozen=True, eq=False)
class KVLayer:
    """One cache entry of one layer: its slice of the pool."""

    format: KVFormat
    values: Tensor
    scales: Tensor | None

    @cached_property
    def handle(self):
        """What the native kernels know it as; of tiles alone."""
        return self.format.arrangement.handle(self)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,) if self.scales is None else (self.values, self.scales)

    @property
    def by_block(self) -> tuple[Tensor, ...]:
        """All of the layer as bytes: uint8 views of its tensors, of which the first dim counts KV blocks."""
        return tuple(self.format.arrangement.by_block(tensor).view(torch.uint8) for tensor in self.tensors)

    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        """k_PDkC, v_PDkC as views of unscaled rows."""
        if self.format.arrangement is not ROWS or self.scales is not None:
            raise ValueError(f"only unquantised rows can be seen as tensors, not {self.format}")
        keys_PDkC = self.values[:, 0]
        return keys_PDkC, keys_PDkC[..., : self.format.value_size] if self.format.shared_values else self.values[:, 1]

    def decoded(self, blocks_J: Tensor) -> tuple[Tensor, Tensor]:
        """k_JDkC, v_JDkC of some KV blocks in rows; float32 where they have scales."""
        scales = None if self.scales is None else self.scales[blocks_J]
        stored, numbers_per_scale = STORED[self.format.dtype], self.format.scales.numbers
        numbers_JADkC = stored.decode(self.values[blocks_J], scales, numbers_per_scale)
        keys_JDkC = numbers_JADkC[:, 0]
        return keys_JDkC, keys_JDkC[..., : self.format.value_size] if self.format.shared_values else numbers_JADkC[:, 1]
