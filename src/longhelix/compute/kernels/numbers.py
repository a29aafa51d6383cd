"""What torch stores of a number format in rows (`longhelix.spec.formats`), and the way there and back."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from longhelix.spec import Scales

VECTOR_SCALES = Scales(32)  # one float32 for each vector
SCALE_DTYPES = {32: torch.float32, 16: torch.bfloat16, 8: torch.float8_e4m3fn}  # by bits


@dataclass(frozen=True)
class StoredNumbers:
    """Numbers as elements of a torch dtype, and their scales.

    A subclass may pack several numbers into one element, which then is uint8.

    Attributes:
        dtype: The dtype of an element.
        largest: The largest magnitude of the numbers that share a scale becomes this one by the scale. None: there are
            no scales.
    """

    dtype: torch.dtype
    largest: float | None = None

    def encode(self, x_TkC: Tensor, scales: Scales = VECTOR_SCALES) -> tuple[Tensor, Tensor | None]:
        """Return the stored form of vectors: elements (T, k, X), and scales (T, k), or (T, k, G) for G scale blocks.

        scales: how many numbers share a scale, and its bits. The last scale block of a vector may be cut short.
        """
        if self.largest is None:
            return x_TkC.to(self.dtype), None
        size = x_TkC.shape[-1]
        x_TkGB = _blocks(x_TkC.float(), scales.numbers)
        scales_TkG = x_TkGB.abs().amax(-1) / self.largest
        if scales.scale_bits == 8:  # where a cast turns what is too large into NaN
            scales_TkG = scales_TkG.clamp(max=torch.finfo(torch.float8_e4m3fn).max)
        scales_TkG = scales_TkG.to(SCALE_DTYPES[scales.scale_bits])
        # A scale below the normal numbers is coarse, and quotients may exceed the largest.
        quotients_TkGB = x_TkGB / scales_TkG.float().masked_fill(scales_TkG == 0, 1.0).unsqueeze(-1)
        kept_TkC = quotients_TkGB.clamp(-self.largest, self.largest).flatten(-2)[..., :size]
        return self.rounded(kept_TkC), scales_TkG if scales.numbers else scales_TkG.squeeze(-1)

    def rounded(self, kept_TkC: Tensor) -> Tensor:
        """Return the elements of numbers that are divided by their scales."""
        return (kept_TkC if self.dtype.is_floating_point else kept_TkC.round()).to(self.dtype)

    def numbers(self, stored: Tensor) -> Tensor:
        """Return the float32 numbers of elements, without their scales."""
        return stored.float()

    def decode(self, stored: Tensor, scales: Tensor | None, numbers_per_scale: int | None = None) -> Tensor:
        """Return the numbers (..., C), in float32 if they have scales.

        scales: as `encode` returns them. numbers_per_scale: None: all of a vector.
        """
        if scales is None:
            return stored
        numbers = self.numbers(stored)
        each = scales.float().unsqueeze(-1)
        if numbers_per_scale is not None:
            each = scales.float().repeat_interleave(numbers_per_scale, dim=-1)[..., : numbers.shape[-1]]
        return numbers * each


def _blocks(x_TkC: Tensor, numbers_per_scale: int | None) -> Tensor:
    """Return x_TkGB: vectors split into scale blocks. The last block is padded with zeros."""
    size = x_TkC.shape[-1]
    block = size if numbers_per_scale is None else numbers_per_scale
    return pad(x_TkC, (0, -size % block)).unflatten(-1, (-1, block))


STORED = {
    "float32": StoredNumbers(torch.float32),
    "bfloat16": StoredNumbers(torch.bfloat16),
    "float16": StoredNumbers(torch.float16),
    "fp8": StoredNumbers(torch.float8_e4m3fn, largest=448.0),
    "int8": StoredNumbers(torch.int8, largest=127.0),
}
