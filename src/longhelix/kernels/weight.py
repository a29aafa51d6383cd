"""Weights of matrix products, and how they can lie in memory."""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from longhelix.errors import UserError
from longhelix.kernels import native
from longhelix.spec import FORMATS


class Arrangement(Protocol):
    """How a weight lies in memory. `longhelix.spec.formats` says which number formats it holds, by its name."""

    name: str

    def holds(self, weight_OI: Tensor, dtype: str) -> bool:
        """Whether this matrix can lie so, stored in `dtype`."""
        ...

    def new_weight(self, weight_OI: Tensor, dtype: str, halves: int) -> "Weight":
        """The matrix, laid out. `halves`: see `make_weight`."""
        ...

    def rows(self, weight: "Weight", indices_T: Tensor) -> Tensor:
        """Rows of W: (T, depth)."""
        ...


class Plain:
    """W as it is, (outputs, depth). torch multiplies with it."""

    name = "plain"

    def holds(self, weight_OI: Tensor, dtype: str) -> bool:
        return self.name in FORMATS[dtype].weights or not weight_OI.numel()

    def new_weight(self, weight_OI: Tensor, dtype: str, halves: int) -> "Weight":
        return Weight(weight_OI, dtype, *weight_OI.shape, self)

    def rows(self, weight: "Weight", indices_T: Tensor) -> Tensor:
        return weight.values[indices_T]


class Panels:
    """What the native CPU kernels read ("packed"): a row of panels, one for every 16 outputs: [input][output], inputs
    in pairs where the numbers are bfloat16 or narrower. Numbers with scales come in blocks of 32 inputs: the block's
    numbers, then 16 float16 scales and 16 float16 offsets, one for each output; weight = scale * stored +
    offset (csrc/kernels.hpp)."""

    name = "panels"

    def holds(self, weight_OI: Tensor, dtype: str) -> bool:
        on_cpu = native.module is not None and weight_OI.device.type == "cpu"
        inputs = FORMATS[dtype].weight_scales.numbers or native.LANES
        return on_cpu and self.name in FORMATS[dtype].weights and weight_OI.shape[1] % inputs == 0

    def new_weight(self, weight_OI: Tensor, dtype: str, halves: int) -> "Weight":
        outputs, depth = weight_OI.shape
        width = outputs // halves
        padded_OI = pad(weight_OI.unflatten(0, (halves, width)), (0, 0, 0, -width % native.LANES)).flatten(0, 1)
        return Weight(_pack(padded_OI, dtype), dtype, outputs, depth, self)

    def rows(self, weight: "Weight", indices_T: Tensor) -> Tensor:
        step = 2 if weight.dtype == "bfloat16" else 1
        panels = weight.values.view(getattr(torch, weight.dtype)).view(-1, weight.depth // step, native.LANES, step)
        return panels[indices_T // native.LANES, :, indices_T % native.LANES].flatten(1)

    def handle(self, weight: "Weight"):
        """The weight as the native kernels know it."""
        number = getattr(native.module.Number, weight.dtype)
        return native.module.Weight(weight.values.data_ptr(), number, weight.depth)


PLAIN, PANELS = Plain(), Panels()
ARRANGEMENTS: dict[str, Arrangement] = {PANELS.name: PANELS, PLAIN.name: PLAIN}  # the faster first


@dataclass(frozen=True, eq=False)
class Weight:
    """y = x W^T. `values`: W (outputs, depth), or its panels (bytes); `dtype`: a number format's name."""

    values: Tensor
    dtype: str
    outputs: int
    depth: int
    arrangement: Arrangement

    @cached_property
    def handle(self):
        """What the native kernels know it as; of panels alone."""
        return self.arrangement.handle(self)

    @property
    def has_rows(self) -> bool:
        """Whether `rows` can give them back as they were."""
        return not FORMATS[self.dtype].weight_scales.bits

    def rows(self, indices_T: Tensor) -> Tensor:
        """Rows of W: (T, depth)."""
        return self.arrangement.rows(self, indices_T)


def make_weight(weight_OI: Tensor, dtype: str, halves: int = 1) -> Weight:
    """In the first arrangement that holds it, quantised if `dtype` is narrow. Raises UserError if none does.

    `halves`: 2 for a gate and an up projection side by side; each half is padded to whole panels.
    """
    chosen = next((arrangement for arrangement in ARRANGEMENTS.values() if arrangement.holds(weight_OI, dtype)), None)
    if chosen is None:
        raise UserError(
            f"weight_dtype {dtype} needs the native CPU kernels and inputs of a multiple of "
            f"{FORMATS[dtype].weight_scales.numbers}, but a weight has {weight_OI.shape[1]}: set weight_dtype to the "
            "model's dtype"
        )
    return chosen.new_weight(weight_OI, dtype, halves)


def _pack(weight_OI: Tensor, dtype: str) -> Tensor:
    if not weight_OI.numel():  # of a rank that owns nothing of it
        return weight_OI.new_empty(0, dtype=torch.uint8)
    lanes_OXI = weight_OI.unflatten(0, (-1, native.LANES))
    if FORMATS[dtype].weight_scales.bits:
        return _pack_narrow(lanes_OXI.float(), dtype)
    typed_OXI = lanes_OXI.to(getattr(torch, dtype))
    units = typed_OXI.unflatten(2, (-1, 2)) if dtype == "bfloat16" else typed_OXI
    return units.transpose(1, 2).contiguous().view(-1).view(torch.uint8)


def _pack_narrow(lanes_OXI: Tensor, dtype: str) -> Tensor:
    blocks = lanes_OXI.unflatten(2, (-1, FORMATS[dtype].weight_scales.numbers))  # (panels, lanes, blocks, 32)
    codes, scales, offsets = _quantise(blocks, dtype)
    # The order that csrc/elements.hpp's byte_offset and Int4 define: unit rows in pairs, or in fours.
    rows = blocks.shape[3] // 2
    if dtype == "int8":
        split = codes.view(*codes.shape[:1], 4, 4, codes.shape[2], rows // 2, 2, 2)
        stored = split.permute(0, 3, 4, 1, 5, 2, 6).flatten(2)
    else:
        split = codes.view(*codes.shape[:1], 4, 4, codes.shape[2], rows // 4, 2, 2, 2)
        low, high = split.unbind(5)
        stored = (low | high << 4).permute(0, 3, 4, 1, 5, 2, 6).flatten(2)
    sides = [side.transpose(1, 2).contiguous().view(torch.uint8) for side in (scales, offsets)]
    return torch.cat((stored, *sides), dim=2).contiguous().view(-1)


def _quantise(blocks: Tensor, dtype: str) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (uint8), float16 scales and offsets of blocks along the last dim."""
    if dtype == "int8":
        scales = (blocks.abs().amax(-1) / 127).half()
        offsets = torch.zeros_like(scales)
        values = (blocks / scales.float().clamp(min=1e-12).unsqueeze(-1)).round().clamp(-127, 127)
        return values.abs().to(torch.uint8) | (values < 0).to(torch.uint8) << 7, scales, offsets
    least, most = blocks.aminmax(dim=-1)
    scales = ((most - least) / 15).half()
    values = ((blocks - least.unsqueeze(-1)) / scales.float().clamp(min=1e-12).unsqueeze(-1)).round().clamp(0, 15)
    return values.to(torch.uint8), scales, (least + 8 * scales.float()).half()
