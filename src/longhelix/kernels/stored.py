"""Keys and values as they are stored, bit for bit, in one form for all arrangements: what leaves a pool and comes back
to another one."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from longhelix.kernels import native
from longhelix.kernels.layer import TILES, KVLayer

# Bits as whole numbers, whatever they stand for: nothing is rounded, and a NaN stays the one that it is.
BITS = {32: torch.int32, 16: torch.int16, 8: torch.uint8, 4: torch.uint8}

# How a panel of rows by 16 lanes lies in memory: the dims inside of a line, each of lanes or of rows. Rows that a line
# has are neighbours; int4 has four more of them in the high halves of its bytes.
_LINES: dict[str, tuple[tuple[str, int], ...]] = {
    "float32": (("lanes", 16),),
    "float16": (("lanes", 16),),
    "bfloat16": (("lanes", 16), ("rows", 2)),
    "fp8": (("lanes", 4), ("rows", 2), ("lanes", 4), ("rows", 2)),
    "int8": (("lanes", 16), ("rows", 4)),
    "int4": (("lanes", 16), ("rows", 4)),
}


@dataclass(frozen=True)
class StoredPart:
    """Keys, values, or the scales of either of all KV blocks of a layer, as bits (J, k, D, C); scales have one channel.

    view: where they lie, (P, k, ...), of which the other dims are those of `tokens`, then those of `channels`, into
    which D and C fall apart. halves: the dim that is not there, because its two lie in the halves of a byte.
    """

    view: Tensor
    tokens: tuple[int, ...]
    channels: tuple[int, ...]
    halves: int | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        """k, D, and C as `read` has it: int4 has two channels in a byte."""
        return self.view.shape[1], math.prod(self.tokens), math.prod(self.channels) // (1 if self.halves is None else 2)

    @property
    def dtype(self) -> torch.dtype:
        return self.view.dtype

    def read(self, blocks_J: Tensor) -> Tensor:
        """The bits of some KV blocks, as a copy."""
        view = self.view[blocks_J]
        if self.halves is not None:
            view = torch.stack((view & 15, view >> 4), self.halves)
        bits_JkDC = view.reshape(*view.shape[:2], math.prod(self.tokens), math.prod(self.channels))
        return bits_JkDC if self.halves is None else bits_JkDC[..., ::2] | bits_JkDC[..., 1::2] << 4

    def write(self, blocks: slice, heads: slice, bits_JkDC: Tensor) -> None:
        """Give some heads of some KV blocks what `read` gave."""
        if self.halves is not None:
            bits_JkDC = torch.stack((bits_JkDC & 15, bits_JkDC >> 4), 4).flatten(3)
        bits = bits_JkDC.unflatten(3, self.channels).unflatten(2, self.tokens)
        if self.halves is not None:
            low, high = bits.unbind(self.halves)
            bits = low | high << 4
        self.view[blocks, heads].copy_(bits)


def stored_parts(layer: KVLayer) -> dict[str, StoredPart]:
    """What a layer stores of a token: keys, values unless these are the keys' first channels, and their scales."""
    return _in_tiles(layer) if layer.format.arrangement is TILES else _in_rows(layer)


def _in_rows(layer: KVLayer) -> dict[str, StoredPart]:
    values, parts = layer.values.view(BITS[layer.format.number.bits]), {}
    for array, name in enumerate(_vectors(layer)):
        view_PkDC = values[:, array].transpose(1, 2)
        parts[name] = StoredPart(view_PkDC, view_PkDC.shape[2:3], view_PkDC.shape[3:])
        if layer.scales is not None:
            scales_PkD1 = layer.scales[:, array].transpose(1, 2).unsqueeze(-1).view(torch.int32)
            parts[f"{name}_scales"] = StoredPart(scales_PkD1, scales_PkD1.shape[2:3], (1,))
    return parts


def _in_tiles(layer: KVLayer) -> dict[str, StoredPart]:
    format, lanes = layer.format, native.LANES
    bytes_PktX, parts, start = layer.values.transpose(0, 1), {}, 0
    for name, size in _vectors(layer).items():
        stop = start + lanes * size * format.number.bits // 8
        numbers_PktX = bytes_PktX[..., start:stop].view(BITS[format.number.bits])
        parts[name] = _panels(numbers_PktX, format.dtype, tokens_are_lanes=name == "keys")
        start = stop
    if start < bytes_PktX.shape[-1]:
        scales_Pkt2D = bytes_PktX[..., start:].view(torch.int16).unflatten(-1, (2, lanes))
        for array, name in enumerate(_vectors(layer)):
            view = scales_Pkt2D[..., array, :].unsqueeze(-1)
            parts[f"{name}_scales"] = StoredPart(view, tuple(view.shape[2:4]), (1,))
    return parts


def _vectors(layer: KVLayer) -> dict[str, int]:
    """Channels of what is kept of a token and head, by name."""
    return dict(zip(("keys", "values"), layer.format.vector_sizes, strict=False))


def _panels(numbers_PktX: Tensor, dtype: str, tokens_are_lanes: bool) -> StoredPart:
    """Keys are one panel, of tokens as lanes and channels as rows; values panels of 16 tokens as rows, and channels."""
    lines = _LINES[dtype]
    line = math.prod(size for _, size in lines)
    if tokens_are_lanes:
        view = numbers_PktX.unflatten(-1, (-1, *(size for _, size in lines)))
        kinds = ["rows", *(kind for kind, _ in lines)]
    else:
        rows = native.LANES // (line // native.LANES * (2 if dtype == "int4" else 1))
        view = numbers_PktX.unflatten(-1, (-1, rows, *(size for _, size in lines)))
        kinds = ["lanes", "rows", *(kind for kind, _ in lines)]
    own = 3  # dims before: blocks, heads, tiles
    of = {kind: [own + dim for dim, found in enumerate(kinds) if found == kind] for kind in ("lanes", "rows")}
    first, second = ("lanes", "rows") if tokens_are_lanes else ("rows", "lanes")
    sizes = {kind: [view.shape[dim] for dim in dims] for kind, dims in of.items()}
    halves = None
    if dtype == "int4":  # between lines and the rows of a line
        sizes["rows"].insert(1, 2)
        halves = own + 1 + (len(of["lanes"]) if tokens_are_lanes else 0)
    view = view.permute(0, 1, 2, *of[first], *of[second])
    return StoredPart(view, (numbers_PktX.shape[2], *sizes[first]), tuple(sizes[second]), halves)
