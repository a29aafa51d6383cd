"""Cosines and sines by which rows are rotated. CPUs run a native kernel, other devices the reference."""

import torch
from torch import Tensor

from longhelix.compute.kernels import native


def rotation(
    positions_T: Tensor, frequencies_TR: Tensor, attention_factor: float, into: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """cos_TR and sin_TR of the angles of every row, times the factor, float32 (R = C/2 pairs). Positions are int64,
    frequencies float64; as frequencies_R they are those of all rows. `into`: where they are written, if not to new
    memory.

    Angles are float64: at position 16,000,000 a float32 angle would be off by half a radian.
    """
    if into is None:
        cos_TR = torch.empty(len(positions_T), frequencies_TR.shape[-1], device=positions_T.device)
        into = cos_TR, torch.empty_like(cos_TR)
    if native.module is not None and positions_T.device.type == "cpu":
        _native(positions_T, frequencies_TR, attention_factor, *into)
    else:
        for target, values in zip(into, reference(positions_T, frequencies_TR, attention_factor), strict=True):
            target.copy_(values)
    return into


def rotation_by_axes(
    positions_3T: Tensor, axes_R: Tensor, frequencies_R: Tensor, attention_factor: float, into: tuple[Tensor, Tensor]
) -> None:
    """Compute `rotation` for rows with a position on each of three axes. Each pair uses the position on its axis."""
    angles_TR = (positions_3T[axes_R].T * frequencies_R).contiguous()
    rotation(positions_3T.new_ones(len(angles_TR)), angles_TR, attention_factor, into)


def reference(positions_T: Tensor, frequencies_TR: Tensor, attention_factor: float) -> tuple[Tensor, Tensor]:
    """Compute `rotation` in float64."""
    angles_TR = positions_T.unsqueeze(-1) * frequencies_TR
    return attention_factor * angles_TR.cos(), attention_factor * angles_TR.sin()


def _native(
    positions_T: Tensor, frequencies_TR: Tensor, attention_factor: float, cos_TR: Tensor, sin_TR: Tensor
) -> None:
    assert positions_T.is_contiguous()
    assert frequencies_TR.stride(-1) == 1
    native.module.angles(
        positions_T.data_ptr(),
        len(positions_T),
        frequencies_TR.data_ptr(),
        frequencies_TR.stride(0) if frequencies_TR.dim() > 1 else 0,
        frequencies_TR.shape[-1],
        attention_factor,
        cos_TR.data_ptr(),
        sin_TR.data_ptr(),
    )
