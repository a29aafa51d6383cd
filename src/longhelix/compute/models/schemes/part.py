"""Part of a quantised weight: reads its tensors, and fills packed rows with codes, scales and zero points."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from longhelix.compute.models.checkpoint import Checkpoint, invalid_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from longhelix.compute.kernels.packed_rows import PackedRows


@dataclass(frozen=True)
class Part:
    """Some rows and inputs of a weight. Names of its tensors are without `prefix`.

    Attributes:
        checkpoint: Where the weight is.
        prefix: What the names of its tensors begin with.
        shape: (O, I) of the whole weight.
        rows: Which rows.
        inputs: Which inputs.
        packed: Their codes and scales, to be filled.
        ordered: The inputs of a scale block do not lie side by side.
    """

    checkpoint: Checkpoint
    prefix: str
    shape: tuple[int, int]
    rows: slice
    inputs: slice
    packed: PackedRows
    ordered: bool = False

    @property
    def blocks(self) -> slice:
        """The scale blocks that have the inputs."""
        return self.spanned(self.inputs, self.packed.format.weight_scales.numbers or self.shape[1])

    @staticmethod
    def spanned(items: slice, unit: int) -> slice:
        """Return the units of `unit` items each that have the items."""
        return slice(items.start // unit, -(-items.stop // unit))

    def read(self, name: str, *slices: slice) -> Tensor:
        """Return part of a tensor."""
        return self.checkpoint.read(self.prefix + name, slices)

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a tensor."""
        return self.prefix + name in self.checkpoint.tensors

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.checkpoint.tensors[self.prefix + name].shape

    def read_for_outputs(self, name: str) -> Tensor:
        """Return the scales of outputs (O) from a tensor with one number, or with one for each output."""
        shape = self.shape_of(name)
        inside = tuple(slice(0, size) for size in shape)
        if prod(shape) == 1:
            return self.read(name, *inside).reshape(1).expand(self.packed.outputs)
        return self.read(name, self.rows, *inside[1:]).flatten()

    def groups(self, name: str) -> Tensor:
        """Return the scale block of each input of the whole weight (I), int64. Without the tensor, they lie in order.

        Raises:
            UserError: A block does not have the inputs that it must have.
        """
        import torch

        numbers, depth = self.packed.format.weight_scales.numbers or 1, self.shape[1]
        sorted_I = torch.arange(depth) // numbers
        if not self.has(name):
            return sorted_I
        group_I = self.read(name, slice(0, depth)).long()
        if not torch.equal(group_I.sort().values, sorted_I):
            self.refuse(name, f"does not have {numbers} inputs for each group of scales")
        return group_I

    def fill_codes(self, codes_OI: Tensor) -> None:
        """Fill codes of a byte each.

        Raises:
            UserError: A code of an 8-bit float is not a number.
        """
        import torch

        codes_OI = codes_OI.view(torch.uint8)
        # NaN has two codes: the largest byte, and the largest of bytes with a sign.
        if self.packed.codes.element == "e4m3" and (
            int(codes_OI.amax()) == 255 or int(codes_OI.view(torch.int8).amax()) == 127
        ):
            self.refuse("weight", "has a weight that is NaN")
        self.packed.code_rows.copy_(codes_OI)

    def fill_halves(self, codes_OX: Tensor, first: int) -> None:
        """Fill codes of four bits.

        Args:
            codes_OX: Bytes with two codes, the first in the low half.
            first: Index of the first code to be filled.
        """
        rows_OX, depth = self.packed.code_rows, self.packed.depth
        codes_OX = codes_OX[:, first // 2 : (first + depth + 1) // 2]
        if first % 2:
            first_OX, second_OX = codes_OX >> 4, codes_OX[:, 1:] << 4
            first_OX[:, : second_OX.shape[1]] |= second_OX
            codes_OX = first_OX[:, : rows_OX.shape[1]]
        rows_OX.copy_(codes_OX)
        if depth % 2:
            rows_OX[:, -1] &= 15

    def fill_scales(self, name: str, scales_OG: Tensor, *, zero: bool = False, negative: bool = False) -> None:
        """Check and fill the scales of blocks.

        Args:
            name: The tensor that has them.
            scales_OG: One for each output and block. Bytes are exponents.
            zero: Whether they may be zero.
            negative: Whether they may be negative.
        """
        import torch

        if scales_OG.dtype == torch.uint8:
            scales_OG = scales_OG.view(torch.float8_e8m0fnu)
        self.check_scales(name, scales_OG, zero, negative)
        self.packed.scales.copy_(scales_OG)

    def fill_output_scale(self, name: str, *, divides: bool) -> None:
        """Check a number by which all numbers of the weight are multiplied or divided, and fill scales of outputs."""
        scale = self.read_for_outputs(name)[:1].float()
        self.check_scales(name, scale)
        if divides:
            scale = scale.reciprocal()
            self.check_scales(name, scale)
        output_scales = self.packed.output_scales
        assert output_scales is not None
        output_scales.copy_(scale.expand(self.packed.outputs))

    def fill_zeros(self, zeros_OG: Tensor) -> None:
        """Fill the zero points of blocks."""
        zeros = self.packed.zeros
        assert zeros is not None
        zeros.copy_(zeros_OG)

    def check_scales(self, name: str, scales: Tensor, zero: bool = False, negative: bool = False) -> None:
        """Raise UserError if a scale is not a finite number, or is zero or negative and must not be."""
        import torch

        if scales.element_size() == 1:  # there are few different ones, and conversions are slow
            counts = scales.reshape(-1).view(torch.uint8).bincount(minlength=256)
            scales = counts.nonzero().flatten().to(torch.uint8).view(scales.dtype)
        values = scales.float()
        wrong = ~values.isfinite()
        if not zero and scales.dtype != torch.float8_e8m0fnu:  # which has no zero
            wrong |= values == 0
        if not negative:
            wrong |= values < 0
        if wrong.any():
            allowed = "finite" + ("" if zero else " and not zero") + ("" if negative else " and not negative")
            self.refuse(name, f"has the scale {values[wrong][0].item()}, but scales must be {allowed}")

    def refuse(self, name: str, what: str) -> None:
        """Raise UserError for a tensor."""
        raise invalid_checkpoint(
            f"tensor {self.prefix + name!r} {what}: download the checkpoint again, or use another one"
        )


def column_bytes(words_WX: Tensor) -> Tensor:
    """Return the bytes of words (X, 4 W) that are packed along the first dim."""
    import torch

    # A clone has the strides of its shape. `contiguous` keeps those of dims of size 1, which cannot be viewed as bytes.
    return words_WX.T.clone(memory_format=torch.contiguous_format).view(torch.uint8)
