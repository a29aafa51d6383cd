"""Blocks of GGUF files are the numbers that the gguf package makes of them, to the bit."""

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from longhelix.compute.kernels import native
from longhelix.compute.models.gguf_blocks import decode

pytestmark = pytest.mark.unit

Q = GGMLQuantizationType


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q8_0, Q.Q4_K, Q.Q5_0, Q.Q6_K], ids=lambda kind: kind.name)
@pytest.mark.parametrize("rows", [1, 3, 1025])
def test_blocks_are_those_of_the_package(kind, rows, is_native, monkeypatch):
    if not is_native:
        monkeypatch.setattr(native, "module", None)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    chance = np.random.default_rng(rows)
    # Any bytes are numbers, but scales that are none.
    stored = chance.integers(0, 256, (rows, 5, block_bytes), np.uint8)
    stored[..., 1] &= 0xBB
    stored[..., 3] &= 0xBB
    if kind == Q.Q6_K:
        stored[..., -1] &= 0xBB
    middle = stored.reshape(rows, -1)[:, block_bytes : 4 * block_bytes]  # as a rank's share of the columns
    values = torch.full((rows, 3 * block), torch.nan)
    decode(middle, kind, values)
    expected = dequantize(np.ascontiguousarray(middle), kind)
    assert np.isfinite(expected).all()
    assert np.array_equal(values.numpy().view(np.uint32), expected.view(np.uint32))
