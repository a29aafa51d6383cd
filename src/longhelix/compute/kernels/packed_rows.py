"""Rows of a packed weight: codes and their scales, as checkpoints store them (`longhelix.spec.formats.Codes`).

One buffer has everything: the codes of all rows, then all scales, zero points, and scales of outputs. Each section
begins at a multiple of 256 bytes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import pad

from longhelix.spec import FORMATS, Codes, NumberFormat

SCALE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e8m0": torch.float8_e8m0fnu,
}
_ALIGNMENT = 256
_CPU = torch.device("cpu")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # OCP Microscaling Formats 1.0, section 5.3.3; bit 3 is the sign
_SYMMETRIC_ZERO = 8  # of uint4
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
        lead: How many inputs of the first scale block belong to another rank.
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
        rows = cls(torch.empty(0, dtype=torch.uint8), dtype, outputs, depth, lead)
        size = sum(_aligned(outputs * row_bytes) for row_bytes in rows.row_bytes)
        return cls(torch.empty(size, dtype=torch.uint8, device=device), dtype, outputs, depth, lead, order_I)

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
        return self.format.scale_blocks(self.depth, self.lead)

    @property
    def row_bytes(self) -> tuple[int, int, int, int]:
        """Bytes of a row's codes, scales, zero points, and output scale."""
        scales, blocks = self.format.weight_scales, self.num_blocks
        code_bytes = (self.depth * self.format.bits + 7) // 8
        return code_bytes, blocks * scales.scale_bits // 8, blocks * scales.offset_bits // 8, scales.vector_bits // 8

    @cached_property
    def code_rows(self) -> Tensor:
        """Codes (O, X), uint8: one for each input, or two, the first in the low half of the byte."""
        return self._section(0)

    @cached_property
    def scales(self) -> Tensor:
        """Scales of the blocks (O, G), in their own dtype."""
        scales_X = self._section(1).flatten().view(SCALE_DTYPES[self.codes.scale])
        return scales_X.view(self.outputs, self.num_blocks)

    @cached_property
    def zeros(self) -> Tensor | None:
        """Zero points (O, G), uint8. None if blocks have none of their own."""
        return self._section(2) if self.codes.zero_points else None

    @cached_property
    def output_scales(self) -> Tensor | None:
        """Scales of outputs (O), float32. None if outputs have none."""
        return self._section(3).view(torch.float32).squeeze(1) if self.format.weight_scales.vector_bits else None

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

    def selected(self, indices_T: Tensor) -> "PackedRows":
        """Return rows in this order."""
        chosen = PackedRows.empty(self.dtype, len(indices_T), self.depth, self.lead, self.buffer.device, self.order_I)
        for to, section in zip(chosen.sections, self.sections, strict=True):
            to.copy_(section[indices_T])
        return chosen

    def cut(self, inputs: slice) -> "PackedRows":
        """Return some inputs of all rows, which lie as they are."""
        assert self.order_I is None
        numbers, depth = self.format.weight_scales.numbers, inputs.stop - inputs.start
        start = self.lead + inputs.start
        lead = 0 if numbers is None or not depth else start % numbers
        part = PackedRows.empty(self.dtype, self.outputs, depth, lead, self.buffer.device)
        if not depth:
            return part
        codes_OX, bits = self.code_rows, self.format.bits
        if bits == 4 and inputs.start % 2:
            codes_OX = packed(unpacked(codes_OX)[:, inputs])
        else:
            codes_OX = codes_OX[:, inputs.start * bits // 8 : (inputs.stop * bits + 7) // 8]
        part.code_rows.copy_(codes_OX)
        first = 0 if numbers is None else start // numbers
        blocks = slice(first, first + part.num_blocks)
        part.scales.copy_(self.scales[:, blocks])
        if self.zeros is not None:
            part.zeros.copy_(self.zeros[:, blocks])
        if self.output_scales is not None:
            part.output_scales.copy_(self.output_scales)
        return part

    def numbers(self, rows: slice = slice(None)) -> Tensor:
        """Return the numbers of some rows in float32, with the inputs as they are in x."""
        values_OI = _values(self.code_rows[rows], self.codes.element)[:, : self.depth]
        scales_OG = self.scales[rows].float()
        if self.codes.element == "uint4":
            zeros_OG = self.zeros
            values_OI = values_OI - (_SYMMETRIC_ZERO if zeros_OG is None else self._spread(zeros_OG[rows].float()))
        if self.output_scales is not None:
            scales_OG = scales_OG * self.output_scales[rows].unsqueeze(1)
        numbers_OI = values_OI * self._spread(scales_OG)
        if self.order_I is None:
            return numbers_OI
        filled = self.order_I >= 0
        return numbers_OI[:, filled][:, self.order_I[filled].argsort()]

    def _spread(self, x_OG: Tensor) -> Tensor:
        """Return what each block has, for each input of it."""
        numbers = self.format.weight_scales.numbers
        if numbers is None:
            return x_OG
        return x_OG.repeat_interleave(numbers, dim=1)[:, self.lead : self.lead + self.depth]


def joined(parts: Sequence[PackedRows]) -> PackedRows:
    """Return the rows of all parts, which have equal formats, inputs and orders."""
    first, outputs = parts[0], sum(part.outputs for part in parts)
    rows = PackedRows.empty(first.dtype, outputs, first.depth, first.lead, first.buffer.device, first.order_I)
    for to, *sections in zip(rows.sections, *(part.sections for part in parts), strict=True):
        torch.cat(sections, out=to)
    return rows


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
    zero_codes_OI = _SYMMETRIC_ZERO
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
        quotients_OGB = quotients_OGB + (_SYMMETRIC_ZERO if zero_OG is None else zero_OG.unsqueeze(-1))
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


def unpacked(codes_OX: Tensor) -> Tensor:
    """Return codes of four bits, one in a byte."""
    return torch.stack((codes_OX & 15, codes_OX >> 4), dim=-1).flatten(1)


def packed(codes_OI: Tensor) -> Tensor:
    """Return codes of four bits, two in a byte. The last byte of an odd number of codes has one."""
    pairs_OX2 = pad(codes_OI, (0, codes_OI.shape[1] % 2)).unflatten(1, (-1, 2))
    return pairs_OX2[..., 0] | pairs_OX2[..., 1] << 4


def _values(codes_OX: Tensor, element: str) -> Tensor:
    """Return what codes stand for, in float32."""
    if element == "e4m3":
        return codes_OX.view(torch.float8_e4m3fn).float()
    if element == "int8":
        return codes_OX.view(torch.int8).float()
    codes_OI = unpacked(codes_OX)
    if element == "uint4":
        return codes_OI.float()
    table = torch.tensor((*_E2M1, *(-value for value in _E2M1)), device=codes_OX.device)
    return table[codes_OI.long()]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
