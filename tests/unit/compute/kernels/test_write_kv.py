"""The reference ops that write into a pool in rows, and their registration."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from longhelix.compute.kernels import ROWS, KVFormat, KVLayer, rotate_and_write, write_kv

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


def layer_of(values_PADkC: Tensor, shared_values: bool = False) -> KVLayer:
    _, _, block_tokens, kv_heads, head_size = values_PADkC.shape
    dtype = str(values_PADkC.dtype).removeprefix("torch.")
    format = KVFormat(dtype, block_tokens, kv_heads, head_size, head_size, ROWS, shared_values=shared_values)
    return KVLayer(format, values_PADkC, None)


def format_arguments(layer: KVLayer) -> tuple[str, str, int, bool, bool]:
    format = layer.format
    return format.arrangement.name, format.dtype, format.value_size, format.shared_values, format.rounded


def rows_and_pool(
    shape: tuple[int, int, int, int], rows: int, dtype: torch.dtype, pool_dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, KVLayer]:
    """k_TkC, v_TkC and a layer (P, D, k, C); rows are slices of a fused projection, as in the models."""
    blocks, block_tokens, kv_heads, head_size = shape
    fused_TXC = torch.randn(rows, 2 * kv_heads + 1, head_size, generator=seeded(seed)).to(dtype)
    _, k_TkC, v_TkC = fused_TXC.split((1, kv_heads, kv_heads), dim=1)
    values_PADkC = random_bits((blocks, 2, block_tokens, kv_heads, head_size), pool_dtype, seed + 1)
    return k_TkC, v_TkC, layer_of(values_PADkC)


def draw_slots(data: st.DataObject, places: int) -> list[int]:
    """Any slots for this rank's rows, -1 for the rows of other ranks."""
    free = list(range(places))
    owned = data.draw(st.lists(st.booleans(), max_size=places))
    random.Random(data.draw(st.integers(0, 2**31))).shuffle(free)
    return [free.pop() if mine else -1 for mine in owned]


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
    slots = draw_slots(data, blocks * block_tokens)
    k_TkC, v_TkC, layer = rows_and_pool((blocks, block_tokens, kv_heads, head_size), len(slots), dtype, pool_dtype)
    expected_PADkC = layer.values.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            block, offset = divmod(slot, block_tokens)
            expected_PADkC[block, 0, offset] = k_TkC[row].to(pool_dtype)
            expected_PADkC[block, 1, offset] = v_TkC[row].to(pool_dtype)
    sources = k_TkC.clone(), v_TkC.clone()
    write_kv(k_TkC, v_TkC, layer, torch.tensor(slots, dtype=torch.int64))
    assert torch.equal(bits(layer.values), bits(expected_PADkC))
    assert torch.equal(k_TkC, sources[0])
    assert torch.equal(v_TkC, sources[1])


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_a_rank_that_owns_no_row_writes_nothing(rows):
    k_TkC, v_TkC, layer = rows_and_pool((3, 4, 2, 16), rows, torch.float32, torch.float32)
    before = bits(layer.values).clone()
    write_kv(k_TkC * math.nan, v_TkC * math.nan, layer, torch.full((rows,), -1))
    assert torch.equal(bits(layer.values), before)


def test_the_first_and_the_last_slot_are_written():
    k_TkC, v_TkC, layer = rows_and_pool((3, 4, 2, 16), 3, torch.float32, torch.float32)
    write_kv(k_TkC, v_TkC, layer, torch.tensor([11, -1, 0]))
    k_PDkC, v_PDkC = layer.keys_and_values()
    assert torch.equal(k_PDkC[2, 3], k_TkC[0])
    assert torch.equal(v_PDkC[2, 3], v_TkC[0])
    assert torch.equal(k_PDkC[0, 0], k_TkC[2])
    assert torch.equal(v_PDkC[0, 0], v_TkC[2])


@pytest.mark.parametrize(("dtype", "fraction_bits"), [(torch.bfloat16, 7), (torch.float16, 10)])
def test_the_pool_dtype_rounds_to_nearest_even(dtype, fraction_bits):
    ulp = 2.0**-fraction_bits
    values = torch.tensor([1 + 0.5 * ulp, 1 + 1.5 * ulp, 1 + 0.75 * ulp, -1 - 0.25 * ulp])
    expected = torch.tensor([1.0, 1 + 2 * ulp, 1 + ulp, -1.0])
    layer = layer_of(torch.zeros(1, 2, 1, 1, 4, dtype=dtype))
    write_kv(values.view(1, 1, 4), values.view(1, 1, 4), layer, torch.tensor([0]))
    assert torch.equal(layer.values.float(), expected.expand(1, 2, 1, 1, 4))


@pytest.mark.parametrize("given_values", [False, True])
def test_shared_values_are_not_written_again(given_values):
    k_TkC, v_TkC, _ = rows_and_pool((3, 4, 1, 16), 2, torch.float32, torch.float32)
    values_PADkC = torch.zeros(3, 1, 4, 1, 16)
    layer = layer_of(values_PADkC, shared_values=True)
    write_kv(k_TkC, v_TkC if given_values else None, layer, torch.tensor([5, -1]))
    assert torch.equal(values_PADkC[1, 0, 1], k_TkC[0])
    assert values_PADkC.count_nonzero() == k_TkC[0].count_nonzero()


def test_slots_beyond_the_pool_are_refused():
    k_TkC, v_TkC, layer = rows_and_pool((3, 4, 2, 16), 1, torch.float32, torch.float32)
    with pytest.raises(IndexError):
        write_kv(k_TkC, v_TkC, layer, torch.tensor([12]))


def test_a_pool_that_is_a_slice_of_heads_is_written():
    k_TkC, v_TkC, _ = rows_and_pool((3, 4, 2, 16), 2, torch.float32, torch.float32)
    wide_PADXC = torch.zeros(3, 2, 4, 5, 16)
    write_kv(k_TkC, v_TkC, layer_of(wide_PADXC[..., 2:4, :]), torch.tensor([5, -1]))
    assert torch.equal(wide_PADXC[1, :, 1, 2:4], torch.stack((k_TkC[0], v_TkC[0])))
    assert wide_PADXC.count_nonzero() == wide_PADXC[1, :, 1, 2:4].count_nonzero()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pool_dtype", DTYPES)
@pytest.mark.parametrize("slots", [[3, -1, 0], [-1, -1, -1], []], ids=["some", "none", "no_rows"])
def test_torch_accepts_the_op_its_mutations_and_its_fake(slots, dtype, pool_dtype):
    k_TkC, v_TkC, _ = rows_and_pool((3, 4, 2, 16), len(slots), dtype, pool_dtype)
    if not slots:  # opcheck cannot copy a slice without elements
        k_TkC, v_TkC = torch.empty(2, 0, 2, 16, dtype=dtype)
    layer = layer_of(torch.randn(3, 2, 4, 2, 16, generator=seeded(3)).to(pool_dtype))
    slots_T = torch.tensor(slots, dtype=torch.int64)
    call = k_TkC, v_TkC, layer.values, None, slots_T, *format_arguments(layer)
    assert set(opcheck(torch.ops.longhelix.write_kv.default, call).values()) == {"SUCCESS"}


def test_the_fake_returns_nothing():
    with FakeTensorMode():
        layer = layer_of(torch.empty(3, 2, 4, 2, 16))
        rows_TkC = torch.empty(5, 2, 16)
        result = write_kv(rows_TkC, rows_TkC, layer, torch.empty(5, dtype=torch.int64))
    assert result is None
    assert torch.ops.longhelix.write_kv.default._schema.is_mutable


def turned(heads_TXC: Tensor, norm_C: Tensor | None, eps: float, angles_TR: Tensor) -> tuple[Tensor, Tensor]:
    """Float64: heads after their norm and their rotation, and the length of each rotated pair, or other channel."""
    heads_TXC = heads_TXC.double()
    if norm_C is not None:
        heads_TXC = heads_TXC * (heads_TXC.square().mean(-1, keepdim=True) + eps) ** -0.5 * norm_C.double()
    turning_TXC, others_TXC = heads_TXC.tensor_split([2 * angles_TR.shape[1]], dim=-1)
    pairs_TXR = torch.complex(*turning_TXC.chunk(2, dim=-1))
    result_TXR = pairs_TXR * torch.exp(1j * angles_TR.double()).unsqueeze(1)
    result_TXC = torch.cat((result_TXR.real, result_TXR.imag, others_TXC), dim=-1)
    return result_TXC, torch.cat((pairs_TXR.abs().repeat(1, 1, 2), others_TXC.abs()), dim=-1)


def assert_turned(actual: Tensor, expected: tuple[Tensor, Tensor], roundings: dict[torch.dtype, int]) -> None:
    """`roundings`: how often a number was rounded to each dtype; each moves a pair by half a unit of its length."""
    wanted, length = expected
    # float32: cos and sin, their products and their sum; a norm's sum of squares is of at most 128 numbers.
    bound = sum(count * torch.finfo(dtype).eps / 2 for dtype, count in roundings.items()) + 160 * 2**-24
    # Below the smallest normal number, half a unit is no longer in proportion.
    assert bool(((actual.double() - wanted).abs() <= bound * length + 2**-25).all())


@given(
    heads=st.tuples(st.integers(1, 7), st.integers(1, 3)),
    half=st.sampled_from([1, 8, 12, 40, 64]),
    share=st.sampled_from([1.0, 0.5, 0.25, 0.0]),
    norms=st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from(DTYPES),
    pool_dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_heads_are_normalised_rotated_and_written(heads, half, share, norms, dtype, pool_dtype, data):
    (query_heads, kv_heads), head_size, eps = heads, 2 * half, 1e-3
    slots = draw_slots(data, 8)
    seed = data.draw(st.integers(0, 2**31))
    count = query_heads + 2 * kv_heads
    qkv_TXC = torch.randn(len(slots), count, head_size, generator=seeded(seed)).to(dtype)
    weights = [
        (torch.randn(head_size, generator=seeded(seed + 1)) / 4 + 1).to(dtype) if norm else None for norm in norms
    ]
    angles_TR = torch.rand(len(slots), int(half * share), generator=seeded(seed + 2)) * 6.25 - 3.125
    layer = layer_of(random_bits((4, 2, 2, kv_heads, head_size), pool_dtype, seed + 3))
    before = layer.values.clone()
    source = qkv_TXC.clone()
    slots_T = torch.tensor(slots, dtype=torch.int64)
    q_TqC = rotate_and_write(qkv_TXC.flatten(1), *weights, eps, angles_TR.cos(), angles_TR.sin(), layer, slots_T)
    assert torch.equal(qkv_TXC, source)
    assert (q_TqC.shape, q_TqC.dtype) == ((len(slots), query_heads, head_size), dtype)
    raw_q_TqC, raw_k_TkC, raw_v_TkC = qkv_TXC.split((query_heads, kv_heads, kv_heads), dim=1)
    # A norm rounds before and after its weight.
    assert_turned(q_TqC, turned(raw_q_TqC, weights[0], eps, angles_TR), {dtype: 3 if norms[0] else 1})
    k_TkC, length_TkC = turned(raw_k_TkC, weights[1], eps, angles_TR)
    for row, slot in enumerate(slots):
        if slot >= 0:
            place = layer.values[slot // 2, :, slot % 2]
            rounded = {dtype: 3 if norms[1] else 1}
            rounded[pool_dtype] = rounded.get(pool_dtype, 0) + 1
            assert_turned(place[0], (k_TkC[row], length_TkC[row]), rounded)
            assert torch.equal(place[1], raw_v_TkC[row].to(pool_dtype))
            layer.values[slot // 2, :, slot % 2] = before[slot // 2, :, slot % 2]
    assert torch.equal(bits(layer.values), bits(before))


@pytest.mark.parametrize("norms", [(False, False), (True, True), (True, False)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [[3, -1, 0], []], ids=["some", "no_rows"])
def test_torch_accepts_the_rotation_its_mutations_and_its_fake(slots, dtype, norms):
    wide_TX = torch.randn(len(slots), 8 * 16, generator=seeded(4)).to(dtype)
    qkv_TX = wide_TX[:, 16:] if slots else wide_TX[:, 16:].contiguous()
    weights = [torch.randn(16, generator=seeded(5)).to(dtype) if norm else None for norm in norms]
    angles_TR = torch.randn(len(slots), 8, generator=seeded(6))
    layer = layer_of(torch.randn(3, 2, 4, 2, 16, generator=seeded(7)))
    slots_T = torch.tensor(slots, dtype=torch.int64)
    call = qkv_TX, *weights, 1e-5, angles_TR.cos(), angles_TR.sin(), layer.values, None, slots_T, 2
    op = torch.ops.longhelix.rotate_and_write.default
    assert set(opcheck(op, (*call, *format_arguments(layer))).values()) == {"SUCCESS"}


def test_the_fake_of_the_rotation_gives_queries():
    with FakeTensorMode():
        layer = layer_of(torch.empty(3, 2, 4, 2, 16))
        angles_TR = torch.empty(5, 8)
        slots_T = torch.empty(5, dtype=torch.int64)
        qkv_TX = torch.empty(5, 10 * 16, dtype=torch.bfloat16)
        q_TqC = rotate_and_write(qkv_TX, None, None, 0.0, angles_TR, angles_TR, layer, slots_T)
    assert (q_TqC.shape, q_TqC.dtype) == ((5, 6, 16), torch.bfloat16)
    assert torch.ops.longhelix.rotate_and_write.default._schema.is_mutable
