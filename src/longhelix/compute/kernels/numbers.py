"""What torch stores of a number format in rows (`longhelix.spec.formats`), and the way there and back."""

from dataclasses import dataclass
from functools import cache
from itertools import pairwise

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


class Nvfp4(StoredNumbers):
    """e2m1 codes with an e4m3 scale for 16 channels, and a power of two for the vector (e8m0).

    A byte holds channels c (low) and c + 8 of a scale block. Scales are bytes: those of the G blocks, then that of the
    vector. The largest number of a block becomes 6, or 4 if that has smaller errors ("four over six", arXiv
    2512.02010), because there is no number between 4 and 6.
    """

    magnitudes = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

    def encode(self, x_TkC: Tensor, scales: Scales = VECTOR_SCALES) -> tuple[Tensor, Tensor]:
        """See `StoredNumbers.encode`: elements (T, k, C / 2) and scales (T, k, G + 1). 16 must divide C."""
        x_TkGB = x_TkC.float().unflatten(-1, (-1, 16))
        # The largest scale lies in [128, 256): scales of numbers up to 2^13 times smaller have all of their bits.
        most_Tk11 = x_TkGB.abs().amax((-2, -1), keepdim=True)
        exponents_Tk11 = (most_Tk11 / 6).view(torch.int32) // 2**23 - 7
        exponents_Tk11 = exponents_Tk11.clamp(min=11)  # no number is below the normal ones of bfloat16
        is_finite_Tk11 = most_Tk11.isfinite()
        x_TkGB = (x_TkGB * ((254 - exponents_Tk11) * 2**23).view(torch.float32)).masked_fill(~is_finite_Tk11, 0.0)
        (scales_TkG1, codes_TkGB, errors_TkG1), other = (self._rounded_blocks(x_TkGB, largest) for largest in (6, 4))
        is_better_TkG1 = other[2] < errors_TkG1
        codes_TkGB = torch.where(is_better_TkG1, other[1], codes_TkGB)
        scales_TkG1 = torch.where(is_better_TkG1, other[0].view(torch.uint8), scales_TkG1.view(torch.uint8))
        vectors_Tk11 = exponents_Tk11.masked_fill(~is_finite_Tk11, 255).to(torch.uint8)
        low_TkGX, high_TkGX = codes_TkGB.chunk(2, dim=-1)
        sides_TkX = torch.cat((scales_TkG1, vectors_Tk11), dim=-2).squeeze(-1)
        return (low_TkGX + 16 * high_TkGX).flatten(-2).to(torch.uint8), sides_TkX

    def _rounded_blocks(self, x_TkGB: Tensor, largest: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return scales (e4m3), codes and sums of squared errors. largest: what the largest of a block becomes."""
        scales_TkG1 = (x_TkGB.abs().amax(-1, keepdim=True) / largest).to(torch.float8_e4m3fn)
        each_TkG1 = scales_TkG1.float()
        quotients_TkGB = x_TkGB / each_TkG1.masked_fill(each_TkG1 == 0, torch.inf)
        bounds = [(a + b) / 2 for a, b in pairwise(self.magnitudes)]
        codes_TkGB = torch.bucketize(quotients_TkGB.abs(), quotients_TkGB.new_tensor(bounds))
        codes_TkGB = codes_TkGB + 8 * (quotients_TkGB < 0)
        errors_TkGB = (self._of_codes(codes_TkGB) * each_TkG1 - x_TkGB).square()
        return scales_TkG1, codes_TkGB, _sum_of_halves(errors_TkGB)

    def _of_codes(self, codes: Tensor) -> Tensor:
        values = (*self.magnitudes, *(-magnitude for magnitude in self.magnitudes))
        return torch.tensor(values, device=codes.device)[codes.long()]

    def decode(self, stored: Tensor, scales: Tensor | None, numbers_per_scale: int | None = None) -> Tensor:
        """See `StoredNumbers.decode`."""
        assert scales is not None
        codes = torch.cat((stored.unflatten(-1, (-1, 8)) % 16, stored.unflatten(-1, (-1, 8)) // 16), dim=-1)
        blocks, vectors = scales.split((scales.shape[-1] - 1, 1), dim=-1)
        each = blocks.contiguous().view(torch.float8_e4m3fn).float()
        each = each * vectors.contiguous().view(torch.float8_e8m0fnu).float()
        return (self._of_codes(codes) * each.unsqueeze(-1)).flatten(-2)


def _sum_of_halves(x_TkGB: Tensor) -> Tensor:
    """Sum the last dim, which stays. Native kernels add in the same order."""
    while x_TkGB.shape[-1] > 1:
        first, second = x_TkGB.chunk(2, dim=-1)
        x_TkGB = first + second
    return x_TkGB


def rotated_channels(x: Tensor) -> Tensor:
    """Return vectors (..., C) times a Hadamard matrix, in float32: orthogonal, and its own inverse.

    The matrix acts on each run of R channels, where R is the largest power of two that divides C. It spreads what one
    channel has over the run, so that no channel decides over the scale of the others (QuaRot, arXiv 2404.00456).
    """
    size = x.shape[-1] & -x.shape[-1]
    return ((x.float().unflatten(-1, (-1, size)) @ _hadamard(size, x.device)) * size**-0.5).flatten(-2)


@cache
def _hadamard(size: int, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


STORED = {
    "float32": StoredNumbers(torch.float32),
    "bfloat16": StoredNumbers(torch.bfloat16),
    "float16": StoredNumbers(torch.float16),
    "fp8": StoredNumbers(torch.float8_e4m3fn, largest=448.0),
    "int8": StoredNumbers(torch.int8, largest=127.0),
    "nvfp4": Nvfp4(torch.uint8, largest=6.0),
}
