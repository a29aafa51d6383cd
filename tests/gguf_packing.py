"""How each kind of block in GGUF files becomes codes, scales and offsets of packed rows (llama.cpp, ggml-common.h).

The reference of the native kernel.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from longhelix.compute.kernels.packed_rows import PackedRows

# The bits of four codes of one bit, as the low bits of four codes of two bits.
_SPREAD = torch.tensor([sum((bits >> i & 1) << 2 * i for i in range(4)) for bits in range(16)], dtype=torch.uint8)


def pack(blocks_OBX: Tensor, kind: str, rows: PackedRows) -> None:
    """Fill packed rows with the numbers of whole blocks.

    Args:
        blocks_OBX: Bytes of the blocks of each row (uint8).
        kind: Kind of the blocks, such as "Q4_K".
        rows: Packed rows in the format of this kind, with as many inputs as the blocks have.
    """
    _KINDS[kind](blocks_OBX, rows)


def _q4_0(blocks_OBX: Tensor, rows: PackedRows) -> None:
    scales, codes = blocks_OBX.split([2, 16], dim=-1)
    _put(rows.scales, scales)
    _put(rows.code_rows, _halves(codes))


def _q4_1(blocks_OBX: Tensor, rows: PackedRows) -> None:
    scales, offsets, codes = blocks_OBX.split([2, 2, 16], dim=-1)
    _put(rows.scales, scales)
    _put(rows.offsets, offsets)
    _put(rows.code_rows, _halves(codes))


def _q5_0(blocks_OBX: Tensor, rows: PackedRows) -> None:
    scales, high, low = blocks_OBX.split([2, 4, 16], dim=-1)
    _put(rows.scales, scales)
    _put_six(rows, _halves(low), _fifth_bits(high))


def _q5_1(blocks_OBX: Tensor, rows: PackedRows) -> None:
    scales, offsets, high, low = blocks_OBX.split([2, 2, 4, 16], dim=-1)
    _put(rows.scales, scales)
    _put(rows.offsets, offsets)
    _put_six(rows, _halves(low), _fifth_bits(high))


def _q8_0(blocks_OBX: Tensor, rows: PackedRows) -> None:
    scales, codes = blocks_OBX.split([2, 32], dim=-1)
    _put(rows.scales, scales)
    _put(rows.code_rows, codes)


def _mxfp4(blocks_OBX: Tensor, rows: PackedRows) -> None:
    scales, codes = blocks_OBX.split([1, 16], dim=-1)
    _put(rows.scales, scales)
    _put(rows.code_rows, _halves(codes))


def _q2_k(blocks_OBX: Tensor, rows: PackedRows) -> None:
    sides, codes, scales, offsets = blocks_OBX.split([16, 64, 2, 2], dim=-1)
    _put(rows.scales, sides & 15)
    _put(rows.offsets, _negative(sides >> 4))
    _put(rows.superblock_scales, scales)
    _put(rows.superblock_offsets, offsets)
    _put(rows.code_rows, _pairs(_quarters(codes)))


def _q3_k(blocks_OBX: Tensor, rows: PackedRows) -> None:
    high, low, sides, scales = blocks_OBX.split([32, 64, 12, 2], dim=-1)
    low_scales, high_scales = sides[..., :8], sides[..., 8:]
    low_OBG = torch.cat((low_scales & 15, low_scales >> 4), dim=-1)
    high_OBG = torch.cat([high_scales >> shift & 3 for shift in range(0, 8, 2)], dim=-1)
    _put(rows.scales, (low_OBG | high_OBG << 4) - 32)
    _put(rows.superblock_scales, scales)
    high_OBI = torch.cat([high >> bit & 1 for bit in range(8)], dim=-1)
    _put(rows.code_rows, _pairs(_quarters(low) | high_OBI << 2))


def _q4_k(blocks_OBX: Tensor, rows: PackedRows) -> None:
    scales, offsets, sides, codes = blocks_OBX.split([2, 2, 12, 128], dim=-1)
    _put_sides(rows, scales, offsets, sides)
    _put(rows.code_rows, _halves(codes.unflatten(-1, (4, 32))))


def _q5_k(blocks_OBX: Tensor, rows: PackedRows) -> None:
    scales, offsets, sides, high, low = blocks_OBX.split([2, 2, 12, 32, 128], dim=-1)
    _put_sides(rows, scales, offsets, sides)
    high_OBX = torch.cat([_fours(high >> bit & 1) for bit in range(8)], dim=-1)
    _put_six(rows, _halves(low.unflatten(-1, (4, 32))), high_OBX)


def _q6_k(blocks_OBX: Tensor, rows: PackedRows) -> None:
    low, high, sides, scales = blocks_OBX.split([128, 64, 16, 2], dim=-1)
    _put(rows.scales, sides)
    _put(rows.superblock_scales, scales)
    high_OB2X = torch.cat([_fours(high.unflatten(-1, (2, 32)) >> shift & 3) for shift in range(0, 8, 2)], dim=-1)
    _put_six(rows, _halves(low.unflatten(-1, (2, 64))), high_OB2X)


def _iq4_xs(blocks_OBX: Tensor, rows: PackedRows) -> None:
    scales, high, low, codes = blocks_OBX.split([2, 2, 4, 128], dim=-1)
    low_OBG = torch.stack((low & 15, low >> 4), dim=-1).flatten(-2)
    high_OBG = torch.stack([high >> shift & 3 for shift in range(0, 8, 2)], dim=-1).flatten(-2)
    _put(rows.scales, (low_OBG | high_OBG << 4) - 32)
    _put(rows.superblock_scales, scales)
    _put(rows.code_rows, _halves(codes.unflatten(-1, (8, 16))))


_KINDS: Mapping[str, Callable[[Tensor, PackedRows], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _q4_0,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


def _put(to: Tensor | None, values: Tensor) -> None:
    """Fill a section of packed rows with the same bytes."""
    assert to is not None
    to.view(torch.uint8).copy_(values.reshape(to.view(torch.uint8).shape))


def _put_six(rows: PackedRows, low_OBX: Tensor, high_OBX: Tensor) -> None:
    """Fill codes of six bits with the bytes of their low four and of their high two bits."""
    low_bytes = rows.depth // 2
    rows.code_rows[:, :low_bytes] = low_OBX.flatten(1)
    rows.code_rows[:, low_bytes:] = high_OBX.flatten(1)


def _put_sides(rows: PackedRows, scales: Tensor, offsets: Tensor, sides_OBX: Tensor) -> None:
    """Fill scales and offsets of six bits, which Q4_K and Q5_K have in twelve bytes, and those of superblocks."""
    first, second, third = sides_OBX.split(4, dim=-1)
    _put(rows.scales, torch.cat((first & 63, third & 15 | first >> 2 & 48), dim=-1))
    _put(rows.offsets, _negative(torch.cat((second & 63, third >> 4 | second >> 2 & 48), dim=-1)))
    _put(rows.superblock_scales, scales)
    _put(rows.superblock_offsets, offsets)


def _negative(bytes_X: Tensor) -> Tensor:
    """Return the bytes of negative integers. Blocks subtract what formats add."""
    return bytes_X.neg()


def _halves(bytes_X: Tensor) -> Tensor:
    """Return bytes with two neighbouring codes each.

    bytes_X: The codes of the first inputs in the low halves of bytes, and those of the other inputs in the high halves.
    """
    even, odd = bytes_X.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat((even & 15 | odd << 4, even >> 4 | odd & 240), dim=-1)


def _quarters(bytes_X: Tensor) -> Tensor:
    """Return codes of two bits, one in a byte. Of 32 bytes, the lowest bits are of the first 32 inputs."""
    parts = bytes_X.unflatten(-1, (-1, 32))
    return torch.cat([parts >> shift & 3 for shift in range(0, 8, 2)], dim=-1).flatten(-2)


def _pairs(codes_I: Tensor) -> Tensor:
    """Return bytes with two codes of four bits each."""
    even, odd = codes_I.unflatten(-1, (-1, 2)).unbind(-1)
    return even | odd << 4


def _fours(codes_I: Tensor) -> Tensor:
    """Return bytes with four codes of two bits each."""
    first, second, third, fourth = codes_I.unflatten(-1, (-1, 4)).unbind(-1)
    return first | second << 2 | third << 4 | fourth << 6


def _fifth_bits(bytes_X: Tensor) -> Tensor:
    """Return bits of codes, eight in a byte, as codes of two bits, four in a byte."""
    return _SPREAD[torch.stack((bytes_X & 15, bytes_X >> 4), dim=-1).flatten(-2).long()]
