"""Rows of a packed weight: codes and their scales, as checkpoints store them (`longhelix.spec.formats.Codes`).

One buffer has everything: the codes of all rows, then all scales, zero points or offsets, scales and offsets of
superblocks, and scales of outputs. Each section begins at a multiple of 256 bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from longhelix.spec import FORMATS, NL4_VALUES, Codes, NumberFormat

SCALE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e8m0": torch.float8_e8m0fnu,
    "int8": torch.int8,
}
_ALIGNMENT = 256
_CPU = torch.device("cpu")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats 1.0, section 5.3.3; bit 3 is the sign
# The largest magnitude of each element and scale. uint4 is symmetric up to 7.
_LARGEST = {"e4m3": 448.0, "e2m1": 6.0, "int8": 127.0, "uint4": 7.0}


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Rows of a weight in a packed format.

    Attributes:
        buffer: All bytes (uint8).
        dtype: Name of a number format with codes.
        outputs: O, the number of rows.
        depth: I, the number of inputs.
        lead: How many inputs of the first scale block or superblock belong to another rank.
        order_I: The input of each place (int32), or -1 where the weights are zero. None: inputs lie as they are.
    """

    buffer: Tensor
    dtype: str
    outputs: int
    depth: int
    lead: int = 0
    order_I: Tensor | None = None

    @classmethod
    def empty(
        cls,
        dtype: str,
        outputs: int,
        depth: int,
        lead: int = 0,
        device: torch.device = _CPU,
        order_I: Tensor | None = None,
    ) -> "PackedRows":
        """Return new rows. Their contents are undefined."""
        rows = cls(torch.empty(0, dtype=torch.uint8), dtype, outputs, depth, lead=lead)
        size = sum(_aligned(outputs * row_bytes) for row_bytes in rows.row_bytes)
        buffer = torch.empty(size, dtype=torch.uint8, device=device)
        return cls(buffer, dtype, outputs, depth, lead=lead, order_I=order_I)

    @property
    def format(self) -> NumberFormat:
        return FORMATS[self.dtype]

    @property
    def codes(self) -> Codes:
        """How the format stores numbers."""
        assert self.format.codes is not None
        return self.format.codes

    @property
    def num_blocks(self) -> int:
        """G, the scale blocks of a row."""
        return self.format.weight_scales.num_blocks(self.depth, self.lead)

    @property
    def num_superblocks(self) -> int:
        """S, the superblocks of a row."""
        return self.format.weight_scales.num_superblocks(self.depth, self.lead)

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of a row in each section."""
        scales, blocks, superblocks = self.format.weight_scales, self.num_blocks, self.num_superblocks
        scale_bytes, offset_bytes = blocks * scales.scale_bits // 8, blocks * scales.offset_bits // 8
        of_superblocks = superblocks * scales.superblock_bits // 8
        parts = (of_superblocks // 2,) * 2 if self.codes.offsets else (of_superblocks, 0)
        return self.format.code_bytes(self.depth), scale_bytes, offset_bytes, *parts, scales.vector_bits // 8

    @cached_property
    def code_rows(self) -> Tensor:
        """Codes (O, X), uint8: one for each input, or two, the first in the low half of the byte.

        Codes of six bits are the low four bits of all inputs, then the high two bits, four in a byte.
        """
        return self._section(0)

    @cached_property
    def scales(self) -> Tensor:
        """Scales of the blocks (O, G), in their own dtype."""
        return self._numbers(1, self.codes.scale)

    @cached_property
    def zeros(self) -> Tensor | None:
        """Zero points (O, G), uint8. None if blocks have none of their own."""
        return self._section(2) if self.codes.zero_points else None

    @cached_property
    def offsets(self) -> Tensor | None:
        """Offsets (O, G), in the dtype of scales. None if blocks have none."""
        return self._numbers(2, self.codes.scale) if self.codes.offsets else None

    @cached_property
    def superblock_scales(self) -> Tensor | None:
        """Scales of superblocks (O, S). None if there are no superblocks."""
        return self._numbers(3, self.codes.superblock) if self.codes.superblock else None

    @cached_property
    def superblock_offsets(self) -> Tensor | None:
        """What offsets of a superblock's blocks are multiplied by (O, S). None if there is none."""
        return self._numbers(4, self.codes.superblock) if self.codes.superblock and self.codes.offsets else None

    @cached_property
    def output_scales(self) -> Tensor | None:
        """Scales of outputs (O), float32. None if outputs have none."""
        return self._numbers(5, "float32").squeeze(1) if self.format.weight_scales.vector_bits else None

    def _numbers(self, index: int, dtype: str) -> Tensor:
        section_OX = self._section(index)
        numbers = section_OX.flatten().view(SCALE_DTYPES[dtype])
        return numbers.view(self.outputs, section_OX.shape[1] // numbers.itemsize)

    def _section(self, index: int) -> Tensor:
        starts = [0]
        for row_bytes in self.row_bytes:
            starts.append(starts[-1] + _aligned(self.outputs * row_bytes))
        start, row_bytes = starts[index], self.row_bytes[index]
        return self.buffer[start : start + self.outputs * row_bytes].view(self.outputs, row_bytes)

    @property
    def sections(self) -> tuple[Tensor, ...]:
        """The bytes of each section, (O, bytes of a row)."""
        return tuple(map(self._section, range(len(self.row_bytes))))

    def copy_(self, rows: "PackedRows") -> None:
        """Copy rows of the same format and inputs."""
        self.buffer.copy_(rows.buffer)

    def selected(self, indices_T: Tensor) -> "PackedRows":
        """Return rows in this order."""
        chosen = PackedRows.empty(self.dtype, len(indices_T), self.depth, self.lead, self.buffer.device, self.order_I)
        for to, section in zip(chosen.sections, self.sections, strict=True):
            to.copy_(section[indices_T])
        return chosen

    def cut(self, inputs: slice) -> "PackedRows":
        """Return some inputs of all rows, which lie as they are."""
        assert self.order_I is None
        scales, depth = self.format.weight_scales, inputs.stop - inputs.start
        start = self.lead + inputs.start
        part = PackedRows.empty(self.dtype, self.outputs, depth, scales.lead(start) if depth else 0, self.buffer.device)
        if not depth:
            return part
        codes_OX, bits = self.code_rows, self.format.bits
        if bits == 6 or (bits == 4 and inputs.start % 2):
            codes_OX = packed(unpacked(codes_OX, bits)[:, inputs], bits)
        else:
            codes_OX = codes_OX[:, inputs.start * bits // 8 : (inputs.stop * bits + 7) // 8]
        part.code_rows.copy_(codes_OX)
        # Blocks before the lead belong to no input.
        skipped = self.lead // scales.numbers if scales.numbers else 0
        first = start // scales.numbers - skipped if scales.numbers else 0
        blocks = slice(first, first + part.num_blocks)
        part.scales.copy_(self.scales[:, blocks])
        if self.zeros is not None:
            part.zeros.copy_(self.zeros[:, blocks])
        if self.offsets is not None:
            part.offsets.copy_(self.offsets[:, blocks])
        superblocks = slice(0, 0)
        if scales.superblock is not None:
            superblocks = slice(start // scales.superblock, start // scales.superblock + part.num_superblocks)
        if self.superblock_scales is not None:
            part.superblock_scales.copy_(self.superblock_scales[:, superblocks])
        if self.superblock_offsets is not None:
            part.superblock_offsets.copy_(self.superblock_offsets[:, superblocks])
        if self.output_scales is not None:
            part.output_scales.copy_(self.output_scales)
        return part

    def numbers(self, rows: slice = slice(None)) -> Tensor:
        """Return the numbers of some rows in float32, with the inputs as they are in x."""
        values_OI = _values(self.code_rows[rows], self.codes.element)[:, : self.depth]
        scales_OG = self._block_numbers(self.scales, self.superblock_scales, rows)
        if self.zeros is not None:
            values_OI = values_OI - self._spread(self.zeros[rows].float())
        elif self.codes.zero:
            values_OI = values_OI - self.codes.zero
        if self.output_scales is not None:
            scales_OG = scales_OG * self.output_scales[rows].unsqueeze(1)
        numbers_OI = values_OI * self._spread(scales_OG)
        if self.offsets is not None:
            numbers_OI += self._spread(self._block_numbers(self.offsets, self.superblock_offsets, rows))
        if self.order_I is None:
            return numbers_OI
        filled = self.order_I >= 0
        return numbers_OI[:, filled][:, self.order_I[filled].argsort()]

    def _spread(self, x_OG: Tensor) -> Tensor:
        """Return what each block has, for each input of it."""
        numbers = self.format.weight_scales.numbers
        if numbers is None:
            return x_OG
        lead = self.lead % numbers
        return x_OG.repeat_interleave(numbers, dim=1)[:, lead : lead + self.depth]

    def _block_numbers(self, of_blocks_OG: Tensor, of_superblocks_OS: Tensor | None, rows: slice) -> Tensor:
        """Return scales or offsets of blocks, times those of their superblocks."""
        of_blocks_OG = of_blocks_OG[rows].float()
        if of_superblocks_OS is None:
            return of_blocks_OG
        scales = self.format.weight_scales
        assert scales.numbers is not None
        assert scales.superblock is not None
        first, blocks = self.lead // scales.numbers, scales.superblock // scales.numbers
        of_each_OG = of_superblocks_OS[rows].float().repeat_interleave(blocks, dim=1)
        return of_blocks_OG * of_each_OG[:, first : first + self.num_blocks]


def joined(parts: Sequence[PackedRows]) -> PackedRows:
    """Return the rows of all parts, which have equal formats, inputs and orders."""
    first, outputs = parts[0], sum(part.outputs for part in parts)
    rows = PackedRows.empty(first.dtype, outputs, first.depth, first.lead, first.buffer.device, first.order_I)
    for to, *sections in zip(rows.sections, *(part.sections for part in parts), strict=True):
        torch.cat(sections, out=to)
    return rows


def repacked(rows: PackedRows, dtype: str) -> PackedRows:
    """Return the same numbers in a K-quant that has smaller blocks, codes of more bits, and offsets."""
    result = PackedRows.empty(dtype, rows.outputs, rows.depth, rows.lead)
    numbers, smaller = rows.format.weight_scales.numbers, result.format.weight_scales.numbers
    assert numbers is not None
    assert smaller is not None
    first = rows.lead // smaller - rows.lead // numbers * (numbers // smaller)
    blocks = slice(first, first + result.num_blocks)
    result.scales.copy_(rows.scales.repeat_interleave(numbers // smaller, dim=1)[:, blocks])
    result.superblock_scales.copy_(rows.superblock_scales)
    if rows.offsets is None:
        result.offsets.zero_()
        result.superblock_offsets.zero_()
    else:
        result.offsets.copy_(rows.offsets.repeat_interleave(numbers // smaller, dim=1)[:, blocks])
        result.superblock_offsets.copy_(rows.superblock_offsets)
    codes_OI = unpacked(rows.code_rows, rows.format.bits)[:, : rows.depth]
    codes_OI = codes_OI + (result.codes.zero - rows.codes.zero)
    result.code_rows.copy_(packed(codes_OI, result.format.bits))
    return result


def ordered(rows: PackedRows, group_I: Tensor, inputs: slice, dtype: str, depth: int) -> PackedRows:
    """Return some inputs, in the order of the scale blocks that they belong to.

    Args:
        rows: The weights with all inputs as they are, and scales of all blocks.
        group_I: The scale block of each input (int64).
        inputs: Which inputs.
        dtype: The number format of the result. It differs from that of the rows at most in the size of scale blocks.
            The inputs of each scale block of the rows are padded to whole scale blocks of the result.
        depth: Number of places for inputs and padding, enough for all of them.
    """
    numbers = FORMATS[dtype].weight_scales.numbers
    assert numbers is not None
    group_L, by_group_L = group_I[inputs].sort(stable=True)
    counts_G = group_L.bincount(minlength=rows.num_blocks)
    blocks_G = (counts_G + numbers - 1) // numbers
    first_place_G, first_input_G = ((x_G.cumsum(0) - x_G) for x_G in (blocks_G * numbers, counts_G))
    place_L = torch.arange(len(group_L)) - first_input_G[group_L] + first_place_G[group_L]
    order_I = torch.full((depth,), -1, dtype=torch.int32)
    order_I[place_L] = by_group_L.int()
    result = PackedRows.empty(dtype, rows.outputs, depth, order_I=order_I)
    filled = torch.arange(rows.num_blocks).repeat_interleave(blocks_G)
    # Blocks without inputs have the scale of the first block: a kernel reads it, so it must be a number.
    block_of_G = torch.zeros(result.num_blocks, dtype=torch.int64)
    block_of_G[: len(filled)] = filled
    result.scales.copy_(rows.scales[:, block_of_G])
    zero_codes_OI = rows.codes.zero
    if rows.zeros is not None:
        result.zeros.copy_(rows.zeros[:, block_of_G])
        zero_codes_OI = result.zeros.repeat_interleave(numbers, dim=1)[:, :depth]
    codes_OI = torch.where(order_I < 0, zero_codes_OI, unpacked(rows.code_rows)[:, inputs][:, order_I.clamp(min=0)])
    result.code_rows.copy_(packed(codes_OI))
    return result


def encoded(weight_OI: Tensor, dtype: str) -> PackedRows:
    """Quantise a matrix. Each output has scales of its own, so its numbers do not depend on other outputs."""
    rows = PackedRows.empty(dtype, *weight_OI.shape, device=weight_OI.device)
    codes, numbers = rows.codes, rows.format.weight_scales.numbers or max(weight_OI.shape[1], 1)
    x_OGB = pad(weight_OI.float(), (0, -weight_OI.shape[1] % numbers)).unflatten(1, (-1, numbers))
    largest_OG = x_OGB.abs().amax(-1)
    if rows.output_scales is not None:
        # The largest scale of an output becomes the largest number that a scale can be.
        rows.output_scales.copy_(_positive(largest_OG.amax(-1) / (_LARGEST[codes.element] * _LARGEST[codes.scale])))
        x_OGB = x_OGB / rows.output_scales.view(-1, 1, 1)
    zero_OG = None
    if codes.zero_points:
        least_OG, most_OG = x_OGB.amin(-1).clamp(max=0), x_OGB.amax(-1).clamp(min=0)
        scales_OG = _positive((most_OG - least_OG) / 15).to(SCALE_DTYPES[codes.scale])
        zero_OG = (-least_OG / scales_OG.float()).round().clamp(0, 15)
        rows.zeros.copy_(zero_OG)
    elif codes.scale == "e8m0":
        # The largest number gets the exponent of the largest that a code can be (OCP Microscaling 1.0, section 6.3).
        exponents_OG = torch.frexp(largest_OG).exponent - math.frexp(_LARGEST[codes.element])[1]
        scales_OG = torch.ldexp(torch.ones_like(largest_OG), exponents_OG.clamp(-126, 127)).to(SCALE_DTYPES["e8m0"])
    else:
        scales_OG = _positive(x_OGB.abs().amax(-1) / _LARGEST[codes.element]).to(SCALE_DTYPES[codes.scale])
    rows.scales.copy_(scales_OG)
    quotients_OGB = x_OGB / scales_OG.float().unsqueeze(-1).clamp(min=1e-38)
    if codes.element == "uint4":
        quotients_OGB = quotients_OGB + (codes.zero if zero_OG is None else zero_OG.unsqueeze(-1))
    codes_OI = _codes(quotients_OGB.flatten(1)[:, : weight_OI.shape[1]], codes.element)
    rows.code_rows.copy_(packed(codes_OI) if rows.format.bits == 4 else codes_OI)
    return rows


def _positive(x: Tensor) -> Tensor:
    """Return scales, with 1 for blocks of zeros."""
    return torch.where(x > 0, x, 1.0)


def _codes(x_OI: Tensor, element: str) -> Tensor:
    """Return the codes (uint8) of the nearest numbers, one in a byte."""
    largest = _LARGEST[element]
    if element == "e4m3":
        return x_OI.clamp(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8)
    if element == "int8":
        return x_OI.round().clamp(-largest, largest).to(torch.int8).view(torch.uint8)
    if element == "uint4":
        return x_OI.round().clamp(0, 15).to(torch.uint8)
    bounds = torch.tensor([(a + b) / 2 for a, b in pairwise(_E2M1)], device=x_OI.device)
    magnitudes_OI = torch.bucketize(x_OI.abs(), bounds)
    return (magnitudes_OI + 8 * (x_OI < 0)).to(torch.uint8)


def unpacked(codes_OX: Tensor, bits: int = 4) -> Tensor:
    """Return codes of four or six bits, one in a byte, and those of the padding of the last bytes."""
    if bits == 4:
        return _unpacked(codes_OX, 4)
    low_bytes = codes_OX.shape[1] // 3 * 2
    return _unpacked(codes_OX[:, :low_bytes], 4) | _unpacked(codes_OX[:, low_bytes:], 2) << 4


def packed(codes_OI: Tensor, bits: int = 4) -> Tensor:
    """Return codes of four or six bits as `PackedRows.code_rows`."""
    if bits == 4:
        return _packed(codes_OI, 4)
    codes_OI = pad(codes_OI, (0, -codes_OI.shape[1] % 4))
    return torch.cat((_packed(codes_OI & 15, 4), _packed(codes_OI >> 4, 2)), dim=1)


def _unpacked(codes_OX: Tensor, bits: int) -> Tensor:
    """Return codes of a few bits, one in a byte. The first of a byte is in its lowest bits."""
    parts = [codes_OX >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(1)


def _packed(codes_OI: Tensor, bits: int) -> Tensor:
    """Return codes of a few bits, several in a byte. The last byte may have fewer."""
    in_byte = 8 // bits
    parts_OXN = pad(codes_OI, (0, -codes_OI.shape[1] % in_byte)).unflatten(1, (-1, in_byte))
    packed_OX = parts_OXN[..., 0].clone()
    for index in range(1, in_byte):
        packed_OX |= parts_OXN[..., index] << index * bits
    return packed_OX


def _values(codes_OX: Tensor, element: str) -> Tensor:
    """Return what codes stand for, in float32."""
    if element == "e4m3":
        return codes_OX.view(torch.float8_e4m3fn).float()
    if element == "int8":
        return codes_OX.view(torch.int8).float()
    if element == "uint6":
        return unpacked(codes_OX, 6).float()
    codes_OI = unpacked(codes_OX)
    if element == "uint4":
        return codes_OI.float()
    values = NL4_VALUES if element == "nl4" else (*_E2M1, *(-value for value in _E2M1))
    return torch.tensor(values, dtype=torch.float32, device=codes_OX.device)[codes_OI.long()]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
