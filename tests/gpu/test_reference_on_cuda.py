"""The reference ops on a CUDA device equal the same ops on the CPU."""

import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from longhelix.kernels import merge_states, partial_attention, write_kv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device that torch can use"),
]

DEVICE = "cuda"
# The same arithmetic in another order, then one rounding, which may fall to the other side.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@pytest.fixture(autouse=True)
def _full_float32_products():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def on_device(inputs: list) -> list:
    return [value.to(DEVICE) if torch.is_tensor(value) else value for value in inputs]


def assert_same_on_device(results: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    for actual, wanted in zip(results, expected, strict=True):
        assert actual.device.type == DEVICE
        assert actual.dtype == wanted.dtype
        torch.testing.assert_close(actual.cpu(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def attention_inputs(dtype: torch.dtype, kv_dtype: torch.dtype) -> list:
    """Prefill over more than one tile, a sequence without rows, rows that see nothing, decodes; NaN where unwritten."""
    generator = torch.Generator().manual_seed(1)
    limits = [[*range(60, 210)], [], [0, 0], [0, 7, 8], [33]]
    lengths = [max(rows, default=0) for rows in limits]
    k_PDkC, v_PDkC = torch.full((2, 30, 16, 3, 64), math.nan, dtype=kv_dtype)
    ids = torch.randperm(30, generator=generator)
    blocks_BJ = torch.zeros(len(limits), 14, dtype=torch.int64)
    used = 0
    for index, length in enumerate(lengths):
        count = math.ceil(length / 16)
        blocks_BJ[index, :count] = ids[used : used + count]
        used += count
        for token in range(length):
            place = blocks_BJ[index, token // 16], token % 16
            k_PDkC[place] = torch.randn(3, 64, generator=generator).to(kv_dtype)
            v_PDkC[place] = torch.randn(3, 64, generator=generator).to(kv_dtype)
    counts = torch.tensor([0, *map(len, limits)])
    limits_T = torch.tensor([limit for rows in limits for limit in rows])
    q_TqC = torch.randn(len(limits_T), 9, 64, generator=generator).to(dtype)
    return [q_TqC, k_PDkC, v_PDkC, blocks_BJ, counts.cumsum(0), limits_T, 0.125]


def merge_inputs(shape: tuple[int, int, int, int], dtype: torch.dtype) -> list:
    generator = torch.Generator().manual_seed(2)
    out_NTQC, lse_NTQ = torch.randn(shape, generator=generator), torch.randn(shape[:3], generator=generator) * 4
    empty_NTQ = torch.rand(shape[:3], generator=generator) < 0.5
    empty_NTQ[:, 0] = True
    out_NTQC = out_NTQC.masked_fill(empty_NTQ.unsqueeze(-1), math.nan).to(dtype)
    return [out_NTQC, lse_NTQ.masked_fill(empty_NTQ, -math.inf)]


def write_inputs(dtype: torch.dtype, kv_dtype: torch.dtype) -> list:
    generator = torch.Generator().manual_seed(3)
    _, k_TkC, v_TkC = torch.randn(20, 15, 64, generator=generator).to(dtype).split((9, 3, 3), dim=1)
    slots_T = torch.randperm(30 * 16, generator=generator)[:20]
    slots_T[::3] = -1
    pools = torch.randn(2, 30, 16, 3, 64, generator=generator).to(kv_dtype)
    return [k_TkC, v_TkC, pools[0], pools[1], slots_T]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kv_dtype", TOLERANCE)
def test_partial_attention_equals_the_cpu(dtype, kv_dtype):
    inputs = attention_inputs(dtype, kv_dtype)
    expected = partial_attention(*inputs)
    assert expected[0].isfinite().all()
    assert_same_on_device(partial_attention(*on_device(inputs)), expected, dtype)


def test_partial_attention_gives_the_same_bits_again():
    inputs = on_device(attention_inputs(torch.bfloat16, torch.bfloat16))
    first, second = partial_attention(*inputs), partial_attention(*inputs)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(4, 7, 2, 32), (8, 16, 4, 128), (16, 16, 64, 512), (256, 2, 3, 8)], ids=str)
def test_merge_states_equals_the_cpu(shape, dtype):
    inputs = merge_inputs(shape, dtype)
    expected = merge_states(*inputs)
    assert torch.equal(expected[0][0], torch.zeros_like(expected[0][0]))
    assert_same_on_device(merge_states(*on_device(inputs)), expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kv_dtype", TOLERANCE)
def test_write_kv_equals_the_cpu_bit_by_bit(dtype, kv_dtype):
    inputs = write_inputs(dtype, kv_dtype)
    device_inputs = [value.clone() for value in on_device(inputs)]
    write_kv(*inputs)
    write_kv(*device_inputs)
    for actual, wanted in zip(device_inputs, inputs, strict=True):
        assert actual.device.type == DEVICE
        assert torch.equal(actual.cpu(), wanted)
    assert not torch.equal(inputs[2], write_inputs(dtype, kv_dtype)[2])


def test_torch_accepts_the_ops_on_the_device():
    ops = torch.ops.longhelix
    for op, inputs in (
        (ops.partial_attention.default, attention_inputs(torch.bfloat16, torch.bfloat16)),
        (ops.merge_states.default, [torch.randn(4, 7, 2, 32), torch.randn(4, 7, 2)]),
        (ops.write_kv.default, write_inputs(torch.bfloat16, torch.bfloat16)),
    ):
        assert set(opcheck(op, tuple(on_device(inputs))).values()) == {"SUCCESS"}
