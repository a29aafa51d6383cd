"""Weights of matrix products, plain or packed for the native CPU kernels.

A packed weight is a row of panels, one for every 16 outputs: [input][output], inputs in pairs where the numbers are
bfloat16 or narrower. Narrow numbers come in scale blocks of 32 inputs: the block's rows of the panel, then 16 float16
scales and 16 float16 offsets, one for each output; weight = scale * stored + offset (csrc/kernels.hpp).
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from longhelix.errors import UserError
from longhelix.kernels import native

SCALE_BLOCK = 32
_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True, eq=False)
class Weight:
    """y = x W^T. `values`: W (outputs, depth), or its panels (bytes); `dtype`: a torch dtype's name or "int4"."""

    values: Tensor
    dtype: str
    outputs: int
    depth: int
    packed: bool

    @cached_property
    def handle(self):
        """The packed weight as the native kernels know it."""
        return native.module.Weight(self.values.data_ptr(), getattr(native.module.Number, self.dtype), self.depth)

    @property
    def has_rows(self) -> bool:
        """Whether `rows` can give them back as they were."""
        return self.dtype not in _BITS

    def rows(self, indices_T: Tensor) -> Tensor:
        """Rows of W: (T, depth)."""
        if not self.packed:
            return self.values[indices_T]
        step = 2 if self.dtype == "bfloat16" else 1
        panels = self.values.view(getattr(torch, self.dtype)).view(-1, self.depth // step, native.LANES, step)
        return panels[indices_T // native.LANES, :, indices_T % native.LANES].flatten(1)


def can_pack(weight_NK: Tensor, dtype: str) -> bool:
    """Whether the native kernels can use this matrix, stored in `dtype`."""
    block = SCALE_BLOCK if dtype in _BITS else native.LANES
    on_cpu = native.module is not None and weight_NK.device.type == "cpu"
    return on_cpu and weight_NK.shape[1] % block == 0


def make_weight(weight_NK: Tensor, dtype: str, halves: int = 1) -> Weight:
    """Pack where the native kernels can use it, quantising if `dtype` is narrow; else keep the rows.

    `halves`: 2 for a gate and an up projection side by side; each half is padded to whole panels.
    """
    outputs, depth = weight_NK.shape
    if not can_pack(weight_NK, dtype):
        if dtype in _BITS and weight_NK.numel():
            raise UserError(
                f"weight_dtype {dtype} needs the native CPU kernels and inputs of a multiple of {SCALE_BLOCK}, "
                f"but a weight has {depth}: set weight_dtype to the model's dtype"
            )
        return Weight(weight_NK, dtype, outputs, depth, packed=False)
    width = outputs // halves
    padded_NK = pad(weight_NK.unflatten(0, (halves, width)), (0, 0, 0, -width % native.LANES)).flatten(0, 1)
    return Weight(_pack(padded_NK, dtype), dtype, outputs, depth, packed=True)


def _pack(weight_NK: Tensor, dtype: str) -> Tensor:
    if not weight_NK.numel():  # of a rank that owns nothing of it
        return weight_NK.new_empty(0, dtype=torch.uint8)
    lanes_NLK = weight_NK.unflatten(0, (-1, native.LANES))
    if dtype in _BITS:
        return _pack_narrow(lanes_NLK.float(), dtype)
    typed_NLK = lanes_NLK.to(getattr(torch, dtype))
    units = typed_NLK.unflatten(2, (-1, 2)) if dtype == "bfloat16" else typed_NLK
    return units.transpose(1, 2).contiguous().view(-1).view(torch.uint8)


def _pack_narrow(lanes_NLK: Tensor, dtype: str) -> Tensor:
    blocks = lanes_NLK.unflatten(2, (-1, SCALE_BLOCK))  # (panels, lanes, blocks, 32)
    codes, scales, offsets = _quantise(blocks, dtype)
    # The order that csrc/simd.hpp's byte_offset and Int4 define: unit rows in pairs, or in fours.
    rows = SCALE_BLOCK // 2
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
