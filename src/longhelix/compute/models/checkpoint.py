"""Reads model files: their tensors, and slices of the tensors.

Opening a checkpoint reads headers only and needs no torch: the front process validates with it.
`read` maps the file, so a rank reads the bytes of its own slices, and a few that follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from longhelix.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor.

    `dtype` is torch's name of it, such as "bfloat16" or "float8_e4m3fn". If longhelix does not read it, it is the
    file's own name, such as "F64". The same holds for quantised GGUF tensors, such as "Q4_1".
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


class Checkpoint(Protocol):
    """A model's files, opened and validated. `tensors` is keyed by Hugging Face names."""

    path: Path
    tensors: Mapping[str, TensorInfo]

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files that contain the tensors, in order."""
        ...

    def read(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """Read a slice of a tensor in the stored dtype, with one `slice(start, stop)` per dim, inside its shape.

        Quantised tensors come dequantised to float32. The result may be a view of the mapped file:
        copy it before writing. Raises KeyError for a name that is not in `tensors`.
        """
        ...


def invalid_checkpoint(message: str) -> UserError:
    return UserError(message, code="invalid_checkpoint")
