"""The bits of KV blocks in an order of their own, beside a second reading of the arrangements."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import packed_pool
from longhelix.compute.kernels import ROWS, TILES, KVFormat, native
from longhelix.compute.kernels.stored import stored_parts

pytestmark = pytest.mark.unit

CPU = torch.device("cpu")
BLOCKS = 5


def layer_of_random_bytes(dtype, arrangement, block_tokens=16, sizes=(32, 48), shared=False):
    layer = KVFormat(dtype, block_tokens, 3, *sizes, arrangement, shared).new_layer(BLOCKS, CPU)
    for tensor in layer.tensors:
        tensor.view(torch.uint8).random_(0, 256)
    return layer


def numbered(bits: NDArray, codes: NDArray) -> bool:
    """Whether bits are those codes, whatever integers hold either."""
    width = np.dtype(f"u{bits.itemsize}")
    return bool(np.array_equal(bits.view(width), codes.astype(width)))


def halves(bits, dim):
    """Rows of int4 from their pairs: of eight the i-th and the one four further."""
    pairs = np.moveaxis(bits, dim, -1).reshape(*np.moveaxis(bits, dim, -1).shape[:-1], -1, 1, 4)
    rows = np.concatenate((pairs & 15, pairs >> 4), axis=-2)
    return np.moveaxis(rows.reshape(*rows.shape[:-3], -1), -1, dim)


@pytest.mark.skipif(native.module is None, reason="this install has no native CPU kernels")
@pytest.mark.parametrize("dtype", packed_pool.BITS)
@pytest.mark.parametrize("block_tokens", [16, 32])
def test_tiles_are_read_in_order(dtype, block_tokens):
    layer = layer_of_random_bytes(dtype, TILES, block_tokens)
    expected, blocks = packed_pool.stored(layer), [3, 0]
    found = {name: part.read(torch.tensor(blocks)).numpy() for name, part in stored_parts(layer).items()}
    keys_JkCD, values_Jk3D16 = found["keys"], found["values"]
    if dtype == "int4":
        keys_JkCD, values_Jk3D16 = halves(keys_JkCD, 2), halves(values_Jk3D16, 3)
    if dtype == "nvfp4":  # channels c and c + 8 of 16
        eights = keys_JkCD.reshape(*keys_JkCD.shape[:2], -1, 8, block_tokens)
        keys_JkCD = np.concatenate((eights & 15, eights >> 4), axis=3).reshape(*keys_JkCD.shape[:2], -1, block_tokens)
        values_Jk3D16 = np.concatenate((values_Jk3D16 & 15, values_Jk3D16 >> 4), axis=-1)
    narrow = dtype in (*packed_pool.LARGEST, "nvfp4")
    assert numbered(keys_JkCD, np.moveaxis(expected.keys[blocks], 1, 3))
    assert numbered(values_Jk3D16, np.moveaxis(expected.values[blocks].reshape(2, block_tokens, 3, 3, 16), 1, 3))
    for name, scales_PDk in (("keys", expected.key_scales), ("values", expected.value_scales)):
        assert (f"{name}_scales" in found) == narrow
        if narrow:
            assert numbered(found[f"{name}_scales"], scales_PDk[blocks].swapaxes(1, 2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "fp8", "int8"])
@pytest.mark.parametrize(("size", "panels"), [(32, 2), (5, 1)])
def test_rows_are_read_in_order(dtype, size, panels):
    layer = layer_of_random_bytes(dtype, ROWS, sizes=(size, size))
    found = {name: part.read(torch.tensor([4, 1])) for name, part in stored_parts(layer).items()}
    kept_JADkC = layer.values.view(found["keys"].dtype)[[4, 1]]
    assert torch.equal(found["keys"], kept_JADkC[:, 0].permute(0, 2, 3, 1))
    assert torch.equal(found["values"], kept_JADkC[:, 1].unflatten(-1, (panels, -1)).permute(0, 2, 3, 1, 4))
    if layer.scales is not None:
        assert torch.equal(found["values_scales"], layer.scales.view(torch.int32)[[4, 1], 1].transpose(1, 2))


EVERY = [
    *((dtype, ROWS, shared) for dtype in ("float32", "bfloat16", "float16", "fp8", "int8", "nvfp4")
      for shared in (False, True)),
    *(pytest.param(dtype, TILES, shared, marks=pytest.mark.skipif(native.module is None, reason="no native kernels"))
      for dtype in packed_pool.BITS for shared in (False, True) if not (shared and dtype in packed_pool.LARGEST)),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "arrangement", "shared"), EVERY)
@pytest.mark.parametrize("block_tokens", [16, 48])
def test_what_is_read_of_one_layer_is_written_to_another(dtype, arrangement, shared, block_tokens):
    """Some heads of some blocks at a time; all other bytes stay."""
    sizes = (32, 16) if shared else (32, 32)
    source, target = (layer_of_random_bytes(dtype, arrangement, block_tokens, sizes, shared) for _ in range(2))
    before = [bytes_PX.clone() for bytes_PX in target.by_block]
    given, kept = stored_parts(source), stored_parts(target)
    assert given.keys() == kept.keys()
    for name, part in kept.items():
        bits = given[name].read(torch.tensor([3, 0]))
        for heads in (slice(0, 1), slice(1, 3)):
            part.write(slice(1, 5, 3), heads, bits[:, heads])
    for found, expected, was in zip(target.by_block, source.by_block, before, strict=True):
        assert torch.equal(found[[1, 4]], expected[[3, 0]])
        assert torch.equal(found[[0, 2, 3]], was[[0, 2, 3]])
