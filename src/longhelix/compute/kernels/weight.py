"""Weights of matrix products, and their arrangements in memory."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from longhelix.compute.kernels import native
from longhelix.compute.kernels.packed_rows import PackedRows, encoded
from longhelix.errors import UserError
from longhelix.spec import FORMATS


class WeightArrangement(Protocol):
    """How a weight lies in memory. `longhelix.spec.formats` lists the number formats of each arrangement, by name."""

    name: str

    def holds(self, shape_OI: tuple[int, int], dtype: str, device: torch.device, lead: int = 0) -> bool:
        """Return whether `device` supports a matrix of this shape, stored in `dtype`. lead: see `Weight`."""
        ...

    def new_weight(self, weight_OI: Tensor, dtype: str, halves: int) -> "Weight":
        """Arrange a matrix of numbers. halves: see `make_weight`."""
        ...

    def of_rows(self, rows: PackedRows, halves: int) -> "Weight":
        """Arrange a packed matrix. halves: see `make_weight`."""
        ...

    def rows(self, weight: "Weight", indices_T: Tensor) -> Tensor:
        """Return rows of W, (T, depth)."""
        ...


class Plain:
    """W without change, (outputs, depth). torch multiplies with it."""

    name = "plain"

    def holds(self, shape_OI: tuple[int, int], dtype: str, device: torch.device, lead: int = 0) -> bool:
        return self.name in FORMATS[dtype].weights or (0 in shape_OI and FORMATS[dtype].codes is None)

    def new_weight(self, weight_OI: Tensor, dtype: str, halves: int) -> "Weight":
        outputs, depth = weight_OI.shape
        return Weight(weight_OI, dtype, outputs, depth, arrangement=self)

    def of_rows(self, rows: PackedRows, halves: int) -> "Weight":
        raise ValueError(f"plain weights have no codes, but {rows.dtype} has: choose another arrangement")

    def rows(self, weight: "Weight", indices_T: Tensor) -> Tensor:
        return weight.values[indices_T]


class Packed:
    """`PackedRows`: codes and scales as checkpoints have them, for GPUs, and for shapes that panels do not hold."""

    name = "packed"

    def holds(self, shape_OI: tuple[int, int], dtype: str, device: torch.device, lead: int = 0) -> bool:
        return self.name in FORMATS[dtype].weights

    def new_weight(self, weight_OI: Tensor, dtype: str, halves: int) -> "Weight":
        return self.of_rows(encoded(weight_OI, dtype), halves)

    def of_rows(self, rows: PackedRows, halves: int) -> "Weight":
        return Weight(
            rows.buffer,
            rows.dtype,
            rows.outputs,
            rows.depth,
            arrangement=self,
            lead=rows.lead,
            order=InputOrder.of(rows),
        )

    def rows(self, weight: "Weight", indices_T: Tensor) -> Tensor:
        return self.rows_of(weight).selected(indices_T).numbers()

    def rows_of(self, weight: "Weight") -> PackedRows:
        return PackedRows(weight.values, weight.dtype, weight.outputs, weight.depth, lead=weight.lead)


class Panels:
    """Panels of 16 outputs for the native CPU kernels ("packed").

    A panel is [input][output], with inputs in pairs if numbers are bfloat16 or narrower. Numbers with scales come in
    blocks of 32 inputs: the numbers, then 16 float16 scales and 16 float16 offsets, one for each output, and weight =
    scale * stored + offset (csrc/kernels.hpp). w8a8 has [four inputs][output] as signed bytes, and after all inputs of
    a panel a float32 scale for each output. Formats with codes have them as they are in checkpoints, each scale block
    followed by its scales.
    """

    name = "panels"

    def holds(self, shape_OI: tuple[int, int], dtype: str, device: torch.device, lead: int = 0) -> bool:
        on_cpu = native.module is not None and device.type == "cpu"
        whole = shape_OI[1] % _multiple(dtype) == 0 and lead % native.LANES == 0
        return on_cpu and self.name in FORMATS[dtype].weights and whole

    def new_weight(self, weight_OI: Tensor, dtype: str, halves: int) -> "Weight":
        if FORMATS[dtype].codes is not None:
            return self.of_rows(encoded(weight_OI, dtype), halves)
        weight = self.new_panels(*weight_OI.shape, dtype, halves)
        self.write(weight_OI, 0, weight, halves)
        return weight

    def of_rows(self, rows: PackedRows, halves: int) -> "Weight":
        weight = self.new_panels(rows.outputs, rows.depth, rows.dtype, halves, rows.lead, InputOrder.of(rows))
        self.write_packed(rows, 0, weight, halves)
        return weight

    def of_bytes(self, rows: PackedRows, halves: int) -> "Weight":
        """Arrange bytes with a scale for each output as w8a8, which has the same bytes and scales."""
        weight = self.new_panels(rows.outputs, rows.depth, "w8a8", halves)
        if not rows.depth or not rows.outputs:
            return weight
        padding = 0, 0, 0, -(rows.outputs // halves) % native.LANES
        codes_HOI, scales_HO1 = (
            pad(section.unflatten(0, (halves, -1)), padding) for section in (rows.code_rows, rows.scales)
        )
        panels_PX = weight.values.view(-1, native.LANES * (rows.depth + 4))
        fours = codes_HOI.view(torch.int32).reshape(-1, native.LANES, rows.depth // 4).transpose(1, 2)
        panels_PX[:, : native.LANES * rows.depth].view(torch.int32).view(fours.shape).copy_(fours)
        panels_PX[:, native.LANES * rows.depth :] = scales_HO1.reshape(-1, native.LANES).view(torch.uint8)
        return weight

    def new_panels(
        self,
        outputs: int,
        depth: int,
        dtype: str,
        halves: int,
        lead: int = 0,
        order: "InputOrder | None" = None,
    ) -> "Weight":
        """Return panels that `write` then fills with outputs. Padding of the last panels is zero."""
        panels = halves * -(-outputs // halves // native.LANES)
        panel_bytes = native.LANES * FORMATS[dtype].weight_row_bytes(depth, lead)
        new = torch.empty if depth else torch.zeros  # without inputs there is nothing to lay out
        values = new(panels * panel_bytes, dtype=torch.uint8)
        if depth and outputs // halves % native.LANES:
            values.view(halves, -1)[:, -panel_bytes:] = 0
        return Weight(values, dtype, outputs, depth, arrangement=self, lead=lead, order=order)

    def write(self, rows_OI: Tensor, first: int, weight: "Weight", halves: int) -> None:
        """Write rows of W (float32, bfloat16 or float16) as the outputs from `first` on."""
        rows_OI = rows_OI if rows_OI.stride(1) == 1 else rows_OI.contiguous()
        for rows, place in _by_half(len(rows_OI), first, weight, halves):
            native.module.pack(
                rows_OI[rows.start].data_ptr(),
                native.NUMBER_BY_DTYPE[rows_OI.dtype],
                rows_OI.stride(0),
                len(rows),
                place,
                weight.values.data_ptr(),
                getattr(native.module.Number, weight.dtype),
                weight.depth,
            )

    def write_packed(self, packed: PackedRows, first: int, weight: "Weight", halves: int) -> None:
        """Write packed rows of W as the outputs from `first` on."""
        for rows, place in _by_half(packed.outputs, first, weight, halves):
            sides = packed.offsets if packed.zeros is None else packed.zeros
            superblocks = packed.superblock_scales, packed.superblock_offsets
            sections = packed.code_rows, packed.scales, sides, *superblocks
            strided = [
                (0, 0) if section is None else (section[rows.start].data_ptr(), section.stride(0) * section.itemsize)
                for section in sections
            ]
            native.module.pack_codes(
                *(argument for section in strided for argument in section),
                0 if packed.output_scales is None else packed.output_scales[rows.start].data_ptr(),
                len(rows),
                place,
                weight.handle,
            )

    def rows(self, weight: "Weight", indices_T: Tensor) -> Tensor:
        step = 2 if weight.dtype == "bfloat16" else 1
        panels = weight.values.view(getattr(torch, weight.dtype)).view(-1, weight.depth // step, native.LANES, step)
        return panels[indices_T // native.LANES, :, indices_T % native.LANES].flatten(1)

    def handle(self, weight: "Weight"):
        """Return the weight in the form that native kernels take."""
        numbers, format = native.module.Number, FORMATS[weight.dtype]
        if format.codes is None:
            return native.module.Weight(weight.values.data_ptr(), getattr(numbers, weight.dtype), weight.depth)
        return native.module.Weight(
            weight.values.data_ptr(),
            getattr(numbers, _CODE_NUMBERS[format.codes.element]),
            weight.depth,
            scale=getattr(numbers, format.codes.scale),
            block=format.weight_scales.numbers or max(weight.depth, 1),
            lead=weight.lead,
            zeros=format.codes.zero_points,
            output_scales=format.weight_scales.vector_bits > 0,
            offsets=format.codes.offsets,
            zero=format.codes.zero,
            superblock=format.weight_scales.superblock or 0,
            rounds_inputs=weight.rounds_inputs,
        )


# What native kernels call the codes of formats.
_CODE_NUMBERS = {
    "e4m3": "e4m3",
    "e2m1": "e2m1",
    "int8": "code8",
    "uint6": "code6",
    "uint4": "code4",
    "nl4": "nl4",
}


def _by_half(count: int, first: int, weight: "Weight", halves: int) -> Iterator[tuple[range, int]]:
    """Yield the rows that belong to each half, and where the first of them lies among the outputs in panels.

    Args:
        count: Number of rows.
        first: The output that is the first row.
    """
    width = weight.outputs // halves
    padded_width = -(-width // native.LANES) * native.LANES
    for half in range(halves):
        start, stop = max(half * width, first), min((half + 1) * width, first + count)
        if start < stop and weight.depth:
            yield range(start - first, stop - first), half * padded_width + start - half * width


def _multiple(dtype: str) -> int:
    """Return the number that must divide the inputs of panels."""
    format = FORMATS[dtype]
    return native.LANES if format.codes is not None else format.weight_scales.numbers or native.LANES


PLAIN, PACKED, PANELS = Plain(), Packed(), Panels()
ARRANGEMENTS: dict[str, WeightArrangement] = {each.name: each for each in (PANELS, PLAIN, PACKED)}  # the faster first


@dataclass(frozen=True, eq=False)
class InputOrder:
    """The order in which a weight takes its inputs from the columns of x.

    Attributes:
        columns_I: The column that each input takes (int32). -1: none, and the input is zero.
        num_columns: Number of columns of x.
    """

    columns_I: Tensor
    num_columns: int

    @classmethod
    def of(cls, rows: PackedRows) -> "InputOrder | None":
        """Return the order of the inputs of these rows. None: they lie as they are."""
        return None if rows.order_I is None else cls(rows.order_I, int(rows.order_I.max()) + 1)


@dataclass(frozen=True, eq=False)
class Weight:
    """The weight W of a product y = x W^T."""

    values: Tensor  # W (outputs, depth), or its panels (bytes)
    dtype: str  # name of a number format
    outputs: int
    depth: int
    arrangement: WeightArrangement
    lead: int = 0  # how many inputs of the first scale block belong to another rank
    order: "InputOrder | None" = None  # in which W takes its inputs from x. None: as they are
    rounds_inputs: bool = False  # products round x: to bytes (panels), or to e4m3 (packed rows in e4m3)

    @cached_property
    def handle(self):
        """The weight in the form that native kernels take. Only for panels."""
        return self.arrangement.handle(self)

    @property
    def has_rows(self) -> bool:
        """Whether `rows` returns exact rows of W."""
        return not FORMATS[self.dtype].weight_scales.bits

    def rows(self, indices_T: Tensor) -> Tensor:
        """Return rows of W, (T, depth)."""
        return self.arrangement.rows(self, indices_T)


def make_weight(weight_OI: Tensor, dtype: str, halves: int = 1) -> Weight:
    """Arrange a matrix in the first possible arrangement, quantised to `dtype`. Raises UserError if there is none.

    halves: 2 for a gate and an up projection in one matrix. Each half is padded to whole panels.
    """
    return choose_arrangement([tuple(weight_OI.shape)], dtype, weight_OI.device).new_weight(weight_OI, dtype, halves)


def choose_arrangement(
    shapes: Iterable[tuple[int, int]], dtype: str, device: torch.device, lead: int = 0
) -> WeightArrangement:
    """Return the first arrangement for matrices of all these shapes. Raises UserError if there is none.

    lead: that of all weights with more than zero, see `Weight`.
    """
    shapes = list(shapes)
    for arrangement in ARRANGEMENTS.values():
        if all(arrangement.holds(shape_OI, dtype, device, lead) for shape_OI in shapes):
            return arrangement
    multiple = _multiple(dtype)
    depth = next((depth for _, depth in shapes if depth % multiple), shapes[0][1])
    requirement, advice = f"weight_dtype {dtype}", "set weight_dtype to the model's dtype"
    if FORMATS[dtype].arithmetic.rounds_inputs:
        requirement, advice = "activation_dtype int8", "leave it out"
    raise UserError(
        f"{requirement} needs the native CPU kernels and weights whose number of inputs is a multiple of {multiple}, "
        f"but a weight has {depth}: {advice}"
    )
