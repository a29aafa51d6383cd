"""Keys and values as they are stored, bit for bit, in one order for all arrangements: what leaves a pool and comes back
to another one.

Of a KV block and head: keys (C, D), values (V / 16, D, 16), or (1, D, V) where sixteens do not divide V, scales (D). It
is the order of tiles of 16 tokens, which kernels of CPUs read, as far as numbers lie one by one there: much may have to
be moved at once. int4 has two rows in a byte, which is told of as one row: of eight the i-th and the one four further.
Where numbers share elements in rows, C and V count elements. Scales of scale blocks are (D, G).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from longhelix.compute.kernels import native
from longhelix.compute.kernels.layer import TILES, KVLayer

# Bits as integers, whatever they stand for: nothing is rounded, and a NaN stays the one that it is.
_BITS = {32: torch.int32, 16: torch.int16, 8: torch.uint8, 4: torch.uint8}
# How a panel, of rows by 16 lanes, lies in memory: what is inside of each of its lines.
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
    """Keys, values, or the scales of either of all KV blocks of a layer.

    view: where they lie, blocks first, then heads; every group of its other dims is one dim of the order above.
    """

    view: Tensor
    groups: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one block and head."""
        return tuple(math.prod(group) for group in self.groups)

    def read(self, blocks_J: Tensor) -> Tensor:
        """The bits of some KV blocks, (J, k, *shape), as a copy."""
        return self.view[blocks_J].reshape(len(blocks_J), self.view.shape[1], *self.shape)

    def write(self, blocks: slice, heads: slice, bits_Jk: Tensor) -> None:
        """Give some heads of some KV blocks what `read` gave."""
        for dim, group in reversed(list(enumerate(self.groups, 2))):
            bits_Jk = bits_Jk.unflatten(dim, group)
        self.view[blocks, heads].copy_(bits_Jk)


def stored_parts(layer: KVLayer) -> dict[str, StoredPart]:
    """What a layer stores of a token: keys, values unless these are the keys' first channels, and their scales."""
    return _in_tiles(layer) if layer.format.arrangement is TILES else _in_rows(layer)


def _in_rows(layer: KVLayer) -> dict[str, StoredPart]:
    bits_PADkC, parts = layer.values.view(_BITS[8 * layer.values.itemsize]), {}
    for array, (name, _) in enumerate(_vectors(layer)):
        bits_PkDC = bits_PADkC[:, array].transpose(1, 2)
        size = bits_PkDC.shape[-1]
        view = bits_PkDC.transpose(2, 3)
        if name == "values":
            lanes = size if size % native.LANES else native.LANES
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
    if start < bytes_PktX.shape[-1]:
        scales_PktAD = bytes_PktX[..., start:].view(torch.int16).unflatten(-1, (-1, native.LANES))
        for array, (name, _) in enumerate(_vectors(layer)):
            scales_PktD = scales_PktAD[..., array, :]
            parts[f"{name}_scales"] = StoredPart(scales_PktD, (scales_PktD.shape[2:],))
    return parts


def _vectors(layer: KVLayer) -> list[tuple[str, int]]:
    """What is kept of a token and head, with its channels."""
    return list(zip(("keys", "values"), layer.format.vector_sizes, strict=False))


def _keys(bits_PktX: Tensor, dtype: str) -> StoredPart:
    """One panel: tokens are lanes, channels are rows."""
    kinds, sizes = zip(*_LINES[dtype], strict=True)
    view = bits_PktX.unflatten(-1, (-1, *sizes))
    return _grouped(view, ["tiles", "rows", *kinds], [["rows"], ["tiles", "lanes"]])


def _values(bits_PktX: Tensor, value_size: int, dtype: str) -> StoredPart:
    """A panel for every 16 channels: tokens are rows, channels are lanes."""
    kinds, sizes = zip(*_LINES[dtype], strict=True)
    panels = value_size // native.LANES
    view = bits_PktX.unflatten(-1, (panels, bits_PktX.shape[-1] // panels // math.prod(sizes), *sizes))
    return _grouped(view, ["tiles", "panels", "rows", *kinds], [["panels"], ["tiles", "rows"], ["lanes"]])


def _grouped(view: Tensor, kinds: list[str], groups: list[list[str]]) -> StoredPart:
    """`kinds`: of the dims of a view, behind blocks and heads. `groups`: which of them make each dim of the order."""
    dims = [[dim for kind in group for dim, found in enumerate(kinds, 2) if found == kind] for group in groups]
    return StoredPart(
        view.permute(0, 1, *(dim for group in dims for dim in group)),
        tuple(tuple(view.shape[dim] for dim in group) for group in dims),
    )
