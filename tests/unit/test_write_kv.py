import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from longhelix.kernels import write_kv

pytestmark = pytest.mark.unit

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def bits(values: Tensor) -> Tensor:
    """The bit pattern, so that NaN equals itself and -0 differs from 0."""
    return values.contiguous().view(BITS[values.dtype])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bit pattern, NaN and infinity included: what an unwritten pool may hold."""
    info = torch.iinfo(BITS[dtype])
    return torch.randint(info.min, info.max, shape, generator=seeded(seed), dtype=BITS[dtype]).view(dtype)


def rows_and_pool(
    shape: tuple[int, int, int, int], rows: int, dtype: torch.dtype, pool_dtype: torch.dtype, seed: int = 0
):
    """k_TkC, v_TkC, k_PDkC, v_PDkC; rows are slices of a fused projection, as in the models."""
    kv_heads = shape[2]
    fused_TXC = torch.randn(rows, 2 * kv_heads + 1, shape[3], generator=seeded(seed)).to(dtype)
    _, k_TkC, v_TkC = fused_TXC.split((1, kv_heads, kv_heads), dim=1)
    return k_TkC, v_TkC, random_bits(shape, pool_dtype, seed + 1), random_bits(shape, pool_dtype, seed + 2)


@settings(deadline=None, max_examples=60)
@given(
    blocks=st.integers(1, 5),
    block_tokens=st.sampled_from([1, 2, 16]),
    kv_heads=st.integers(1, 3),
    head_size=st.sampled_from([1, 16, 24]),
    dtype=st.sampled_from(DTYPES),
    pool_dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_writes_its_own_rows_to_their_slots_and_nothing_else(
    blocks, block_tokens, kv_heads, head_size, dtype, pool_dtype, data
):
    places = list(range(blocks * block_tokens))
    owned = data.draw(st.lists(st.booleans(), max_size=len(places)))
    random.Random(data.draw(st.integers(0, 2**31))).shuffle(places)
    slots = [places.pop() if mine else -1 for mine in owned]
    shape = (blocks, block_tokens, kv_heads, head_size)
    k_TkC, v_TkC, k_PDkC, v_PDkC = rows_and_pool(shape, len(slots), dtype, pool_dtype)
    expected_k_PDkC, expected_v_PDkC = k_PDkC.clone(), v_PDkC.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            block, offset = divmod(slot, block_tokens)
            expected_k_PDkC[block, offset] = k_TkC[row].to(pool_dtype)
            expected_v_PDkC[block, offset] = v_TkC[row].to(pool_dtype)
    sources = k_TkC.clone(), v_TkC.clone()
    write_kv(k_TkC, v_TkC, k_PDkC, v_PDkC, torch.tensor(slots, dtype=torch.int64))
    assert torch.equal(bits(k_PDkC), bits(expected_k_PDkC))
    assert torch.equal(bits(v_PDkC), bits(expected_v_PDkC))
    assert torch.equal(k_TkC, sources[0])
    assert torch.equal(v_TkC, sources[1])


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_a_rank_that_owns_no_row_writes_nothing(rows):
    k_TkC, v_TkC, k_PDkC, v_PDkC = rows_and_pool((3, 4, 2, 16), rows, torch.float32, torch.float32)
    before = bits(k_PDkC).clone(), bits(v_PDkC).clone()
    write_kv(k_TkC * math.nan, v_TkC * math.nan, k_PDkC, v_PDkC, torch.full((rows,), -1))
    assert torch.equal(bits(k_PDkC), before[0])
    assert torch.equal(bits(v_PDkC), before[1])


def test_the_first_and_the_last_slot_are_written():
    k_TkC, v_TkC, k_PDkC, v_PDkC = rows_and_pool((3, 4, 2, 16), 3, torch.float32, torch.float32)
    write_kv(k_TkC, v_TkC, k_PDkC, v_PDkC, torch.tensor([11, -1, 0]))
    assert torch.equal(k_PDkC[2, 3], k_TkC[0])
    assert torch.equal(v_PDkC[2, 3], v_TkC[0])
    assert torch.equal(k_PDkC[0, 0], k_TkC[2])
    assert torch.equal(v_PDkC[0, 0], v_TkC[2])


@pytest.mark.parametrize(("dtype", "fraction_bits"), [(torch.bfloat16, 7), (torch.float16, 10)])
def test_the_pool_dtype_rounds_to_nearest_even(dtype, fraction_bits):
    ulp = 2.0**-fraction_bits
    values = torch.tensor([1 + 0.5 * ulp, 1 + 1.5 * ulp, 1 + 0.75 * ulp, -1 - 0.25 * ulp])
    expected = torch.tensor([1.0, 1 + 2 * ulp, 1 + ulp, -1.0])
    pools = torch.zeros(2, 1, 1, 1, 4, dtype=dtype)
    write_kv(values.view(1, 1, 4), values.view(1, 1, 4), pools[0], pools[1], torch.tensor([0]))
    assert torch.equal(pools.float(), expected.expand(2, 1, 1, 1, 4))


def test_slots_beyond_the_pool_are_refused():
    k_TkC, v_TkC, k_PDkC, v_PDkC = rows_and_pool((3, 4, 2, 16), 1, torch.float32, torch.float32)
    with pytest.raises(IndexError):
        write_kv(k_TkC, v_TkC, k_PDkC, v_PDkC, torch.tensor([12]))


def test_pools_that_are_slices_of_heads_are_written():
    k_TkC, v_TkC, *_ = rows_and_pool((3, 4, 2, 16), 2, torch.float32, torch.float32)
    both_PDXC = torch.zeros(3, 4, 4, 16)
    write_kv(k_TkC, v_TkC, both_PDXC[:, :, :2], both_PDXC[:, :, 2:], torch.tensor([5, -1]))
    assert torch.equal(both_PDXC[1, 1], torch.cat((k_TkC[0], v_TkC[0])))
    assert both_PDXC.count_nonzero() == both_PDXC[1, 1].count_nonzero()


def test_pools_whose_blocks_are_apart_are_written_or_refused():
    k_TkC, v_TkC, *_ = rows_and_pool((3, 4, 2, 16), 2, torch.float32, torch.float32)
    pairs_P2DkC = torch.zeros(3, 2, 4, 2, 16)
    try:
        write_kv(k_TkC, v_TkC, pairs_P2DkC[:, 0], pairs_P2DkC[:, 1], torch.tensor([5, -1]))
    except RuntimeError:
        return
    assert torch.equal(pairs_P2DkC[1, :, 1], torch.stack((k_TkC[0], v_TkC[0])))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pool_dtype", DTYPES)
@pytest.mark.parametrize("slots", [[3, -1, 0], [-1, -1, -1], []], ids=["some", "none", "no_rows"])
def test_torch_accepts_the_op_its_mutations_and_its_fake(slots, dtype, pool_dtype):
    k_TkC, v_TkC, *_ = rows_and_pool((3, 4, 2, 16), len(slots), dtype, pool_dtype)
    if not slots:  # opcheck cannot copy a slice without elements
        k_TkC, v_TkC = torch.empty(2, 0, 2, 16, dtype=dtype)
    pools = [torch.randn(3, 4, 2, 16, generator=seeded(3)).to(pool_dtype) for _ in range(2)]
    results = opcheck(
        torch.ops.longhelix.write_kv.default, (k_TkC, v_TkC, *pools, torch.tensor(slots, dtype=torch.int64))
    )
    assert set(results.values()) == {"SUCCESS"}


def test_the_fake_returns_nothing():
    with FakeTensorMode():
        pool_PDkC = torch.empty(3, 4, 2, 16)
        rows_TkC = torch.empty(5, 2, 16)
        result = write_kv(rows_TkC, rows_TkC, pool_PDkC, pool_PDkC.clone(), torch.empty(5, dtype=torch.int64))
    assert result is None
    assert torch.ops.longhelix.write_kv.default._schema.is_mutable
