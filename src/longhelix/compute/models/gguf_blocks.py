"""Blocks of narrow numbers in GGUF files, as float32.

The kinds that most files are made of natively; all others by the gguf package, in pieces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

if TYPE_CHECKING:
    import torch

_NATIVE_KINDS = ("Q4_0", "Q4_1", "Q8_0")
# At a time: the package needs about twice the float32 size of what it is given.
_ROWS = 1024


def decode(stored: np.ndarray, kind: GGMLQuantizationType, values: torch.Tensor) -> None:
    """Rows of whole blocks, bytes [R, blocks * block_bytes], into `values` [R, blocks * block], float32."""
    from longhelix.compute.kernels import native

    block_bytes = GGML_QUANT_SIZES[kind][1]
    if native.module is not None and kind.name in _NATIVE_KINDS and stored.strides[1] == 1:
        native.module.dequantise(
            stored.ctypes.data,
            stored.strides[0],
            len(stored),
            stored.shape[1] // block_bytes,
            getattr(native.module.BlockKind, kind.name.lower()),
            values.data_ptr(),
        )
        return
    out = values.numpy()
    for start in range(0, len(stored), _ROWS):
        out[start : start + _ROWS] = dequantize(stored[start : start + _ROWS], kind)
