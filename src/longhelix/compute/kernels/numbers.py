"""What torch stores of a number format in rows (`longhelix.spec.formats`), and the way there and back."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StoredNumbers:
    """Numbers of a torch dtype. `largest`: what the largest magnitude of a vector becomes by its scale; None: they have
    no scales."""

    dtype: torch.dtype
    largest: float | None = None

    def encode(self, x_TkC: Tensor) -> tuple[Tensor, Tensor | None]:
        """Numbers as they are stored (T, k, C), and their scales (T, k) in float32."""
        if self.largest is None:
            return x_TkC.to(self.dtype), None
        wide_TkC = x_TkC.float()
        scales_Tk = wide_TkC.abs().amax(-1) / self.largest
        # A scale below the normal numbers is coarse, and quotients may exceed the largest.
        quotients_TkC = wide_TkC / scales_Tk.masked_fill(scales_Tk == 0, 1.0).unsqueeze(-1)
        kept_TkC = quotients_TkC.clamp(-self.largest, self.largest)
        return (kept_TkC if self.dtype.is_floating_point else kept_TkC.round()).to(self.dtype), scales_Tk

    def decode(self, stored: Tensor, scales: Tensor | None) -> Tensor:
        """Numbers (..., C) in float32 of what is stored with the scales (...), or as they are."""
        return stored if scales is None else stored.float() * scales.unsqueeze(-1)


STORED = {
    "float32": StoredNumbers(torch.float32),
    "bfloat16": StoredNumbers(torch.bfloat16),
    "float16": StoredNumbers(torch.float16),
    "fp8": StoredNumbers(torch.float8_e4m3fn, largest=448.0),
    "int8": StoredNumbers(torch.int8, largest=127.0),
}
