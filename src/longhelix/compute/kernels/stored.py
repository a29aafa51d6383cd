"""Stored keys and values, bit for bit, in one order for all arrangements. Used to move KV from one pool to another.

For a KV block and head: keys (C, D), values (V / 16, D, 16), or (1, D, V) if 16 does not divide V, scales (D), or (D,
G) if vectors have several. This order is close to tiles of 16 tokens, so that CPUs can copy large pieces. int4 has two
rows in a byte, which count as one row: of eight rows, row i and row i + 4. If numbers of a vector share elements, C, V
and 16 count elements.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from longhelix.compute.kernels import native
from longhelix.compute.kernels.layer import TILES, KVLayer

# Bits are copied as integers, so nothing is rounded, and NaNs keep their bits.
_BITS = {32: torch.int32, 16: torch.int16, 8: torch.uint8, 4: torch.uint8}
# Layout of each line of a panel, which has rows by 16 lanes.
_LINES: dict[str, tuple[tuple[str, int], ...]] = {
    "float32": (("lanes", 16),),
    "float16": (("lanes", 16),),
    "bfloat16": (("lanes", 16), ("rows", 2)),
    "fp8": (("lanes", 4), ("rows", 2), ("lanes", 4), ("rows", 2)),
    "int8": (("lanes", 16), ("rows", 4)),
    "int4": (("lanes", 16), ("rows", 4)),
    "nvfp4": (("lanes", 4), ("rows", 2), ("lanes", 4), ("rows", 2)),
}
# The same for values, where they differ from keys.
_VALUE_LINES = {"nvfp4": (("rows", 2), ("lanes", 2), ("rows", 2), ("lanes", 4), ("rows", 2))}


@dataclass(frozen=True)
class StoredPart:
    """Keys, values, or the scales of either, of all KV blocks of a layer."""

    view: Tensor  # of the pool: KV blocks, heads, other dims
    groups: tuple[tuple[int, ...], ...]  # of the other dims; each group is one dim of the order above

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one KV block and head."""
        return tuple(math.prod(group) for group in self.groups)

    def read(self, blocks_J: Tensor) -> Tensor:
        """Return a copy of the bits of some KV blocks, (J, k, *shape)."""
        return self.view[blocks_J].reshape(len(blocks_J), self.view.shape[1], *self.shape)

    def write(self, blocks: slice, heads: slice, bits_Jk: Tensor) -> None:
        """Overwrite some heads of some KV blocks by bits that `read` returned."""
        for dim, group in reversed(list(enumerate(self.groups, 2))):
            bits_Jk = bits_Jk.unflatten(dim, group)
        self.view[blocks, heads].copy_(bits_Jk)


def stored_parts(layer: KVLayer) -> dict[str, StoredPart]:
    """Return the parts of a layer by name: keys, values if they are stored separately, and their scales."""
    return _in_tiles(layer) if layer.format.arrangement is TILES else _in_rows(layer)


def _in_rows(layer: KVLayer) -> dict[str, StoredPart]:
    bits_PADkC, parts = layer.values.view(_BITS[8 * layer.values.itemsize]), {}
    for array, (name, _) in enumerate(_vectors(layer)):
        bits_PkDC = bits_PADkC[:, array].transpose(1, 2)
        size = bits_PkDC.shape[-1]
        view = bits_PkDC.transpose(2, 3)
        if name == "values":
            panel = native.LANES * layer.format.number.bits // (8 * layer.values.itemsize)
            lanes = size if size % panel else panel
            view = bits_PkDC.unflatten(3, (-1, lanes)).transpose(2, 3)
        parts[name] = StoredPart(view, tuple((dim,) for dim in view.shape[2:]))
        if layer.scales is not None:
            scales_PkDG = layer.scales[:, array].transpose(1, 2).view(_BITS[8 * layer.scales.itemsize])
            parts[f"{name}_scales"] = StoredPart(scales_PkDG, tuple((dim,) for dim in scales_PkDG.shape[2:]))
    return parts


def _in_tiles(layer: KVLayer) -> dict[str, StoredPart]:
    format, parts, start = layer.format, {}, 0
    bytes_PktX = layer.values.transpose(0, 1)
    for name, size in _vectors(layer):
        stop = start + native.LANES * size * format.number.bits // 8
        bits_PktX = bytes_PktX[..., start:stop].view(_BITS[format.number.bits])
        parts[name] = _keys(bits_PktX, format.dtype) if name == "keys" else _values(bits_PktX, size, format.dtype)
        start = stop
    if format.scales.numbers is not None:
        for name, size in _vectors(layer):
            stop = start + native.LANES * (format.scales.num_blocks(size) + 1)
            scales_PktGD = bytes_PktX[..., start:stop].unflatten(-1, (-1, native.LANES))
            scales_PktDG = scales_PktGD.transpose(-1, -2)
            groups = scales_PktDG.shape[2:4], scales_PktDG.shape[4:]
            parts[f"{name}_scales"] = StoredPart(scales_PktDG, groups)
            start = stop
    elif start < bytes_PktX.shape[-1]:
        scales_PktAD = bytes_PktX[..., start:].view(torch.int16).unflatten(-1, (-1, native.LANES))
        for array, (name, _) in enumerate(_vectors(layer)):
            scales_PktD = scales_PktAD[..., array, :]
            parts[f"{name}_scales"] = StoredPart(scales_PktD, (scales_PktD.shape[2:],))
    return parts


def _vectors(layer: KVLayer) -> list[tuple[str, int]]:
    """Return the name and the channels of each vector that is stored for a token and head."""
    return list(zip(("keys", "values"), layer.format.vector_sizes, strict=False))


def _keys(bits_PktX: Tensor, dtype: str) -> StoredPart:
    """Return keys, which are one panel: tokens are lanes, channels are rows."""
    kinds, sizes = zip(*_LINES[dtype], strict=True)
    view = bits_PktX.unflatten(-1, (-1, *sizes))
    return _grouped(view, ["tiles", "rows", *kinds], [["rows"], ["tiles", "lanes"]])


def _values(bits_PktX: Tensor, value_size: int, dtype: str) -> StoredPart:
    """Return values, which have a panel for every 16 channels: tokens are rows, channels are lanes."""
    kinds, sizes = zip(*_VALUE_LINES.get(dtype, _LINES[dtype]), strict=True)
    panels = value_size // native.LANES
    view = bits_PktX.unflatten(-1, (panels, bits_PktX.shape[-1] // panels // math.prod(sizes), *sizes))
    return _grouped(view, ["tiles", "panels", "rows", *kinds], [["panels"], ["tiles", "rows"], ["lanes"]])


def _grouped(view: Tensor, kinds: list[str], groups: list[list[str]]) -> StoredPart:
    """Permute a view. kinds: of its dims after blocks and heads. groups: the kinds that make each dim of the order."""
    dims = [
        [dim for kind in group for dim, kind_of_dim in enumerate(kinds, 2) if kind_of_dim == kind] for group in groups
    ]
    return StoredPart(
        view.permute(0, 1, *(dim for group in dims for dim in group)),
        tuple(tuple(view.shape[dim] for dim in group) for group in dims),
    )
