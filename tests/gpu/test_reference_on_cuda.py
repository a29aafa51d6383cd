"""The reference on a CUDA device equals the reference on the CPU, and torch accepts the ops there."""

import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from block_extents import side_by_side
from longhelix.compute.kernels import (
    PLAIN,
    ROWS,
    Experts,
    KVFormat,
    KVLayer,
    Weight,
    linear,
    reference,
    rotate_and_write,
    route,
    run_experts,
)
from longhelix.compute.kernels.library import activation_arguments
from longhelix.spec import Activation, MoE, Routing

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
    counts = [math.ceil(length / 16) for length in lengths]
    blocks = ids.split([*counts, 30 - sum(counts)])[:-1]
    for blocks_J, length in zip(blocks, lengths, strict=True):
        for token in range(length):
            place = blocks_J[token // 16], token % 16
            k_PDkC[place] = torch.randn(3, 64, generator=generator).to(kv_dtype)
            v_PDkC[place] = torch.randn(3, 64, generator=generator).to(kv_dtype)
    rows = torch.tensor([0, *map(len, limits)])
    limits_T = torch.tensor([limit for rows in limits for limit in rows])
    q_TqC = torch.randn(len(limits_T), 9, 64, generator=generator).to(dtype)
    return [q_TqC, k_PDkC, v_PDkC, *side_by_side(blocks), rows.cumsum(0), limits_T, 0.125]


def pool_arguments(k_PDkC: Tensor, v_PDkC: Tensor) -> tuple:
    """Values, scales and format of a layer in rows, as the ops take them."""
    dtype = str(k_PDkC.dtype).removeprefix("torch.")
    return (torch.stack((k_PDkC, v_PDkC), dim=1), None), ("rows", dtype, k_PDkC.shape[-1], False, False)


def layer_of(k_PDkC: Tensor, v_PDkC: Tensor) -> KVLayer:
    (values, scales), (_, dtype, size, shared, _) = pool_arguments(k_PDkC, v_PDkC)
    return KVLayer(KVFormat(dtype, *k_PDkC.shape[1:3], size, size, ROWS, shared_values=shared), values, scales)


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


def rotation_inputs(dtype: torch.dtype) -> list:
    """qkv_TX of 9 query and 3 KV heads, weights of both norms, epsilon, cosines and sines."""
    generator = torch.Generator().manual_seed(4)
    qkv_TX = torch.randn(20, 16 * 64, generator=generator)[:, 64:].to(dtype)
    q_norm, k_norm = (1 + torch.randn(2, 64, generator=generator) / 4).to(dtype)
    angles_TR = torch.randn(20, 32, generator=generator) * 3
    return [qkv_TX, q_norm, k_norm, 1e-5, angles_TR.cos(), angles_TR.sin()]


def linear_inputs(dtype: torch.dtype) -> list:
    """Everything that may stand around a product, at once."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return [
        normal(20, 96),
        normal(80, 96) / 10,
        normal(80),
        normal(96),
        1e-5,
        Activation(),
        normal(20, 40),
        torch.float32,
    ]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kv_dtype", TOLERANCE)
def test_partial_attention_equals_the_cpu(dtype, kv_dtype):
    inputs = attention_inputs(dtype, kv_dtype)
    expected = reference.partial_attention(*inputs)
    assert expected[0].isfinite().all()
    assert_same_on_device(reference.partial_attention(*on_device(inputs)), expected, dtype)


def test_partial_attention_gives_the_same_bits_again():
    inputs = on_device(attention_inputs(torch.bfloat16, torch.bfloat16))
    first, second = reference.partial_attention(*inputs), reference.partial_attention(*inputs)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(4, 7, 2, 32), (8, 16, 4, 128), (16, 16, 64, 512), (256, 2, 3, 8)], ids=str)
def test_merge_states_equals_the_cpu(shape, dtype):
    inputs = merge_inputs(shape, dtype)
    expected = reference.merge_states(*inputs)
    assert torch.equal(expected[0][0], torch.zeros_like(expected[0][0]))
    assert_same_on_device(reference.merge_states(*on_device(inputs)), expected, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kv_dtype", TOLERANCE)
def test_write_kv_equals_the_cpu_bit_by_bit(dtype, kv_dtype):
    inputs = write_inputs(dtype, kv_dtype)
    device_inputs = [value.clone() for value in on_device(inputs)]
    for k_TkC, v_TkC, k_PDkC, v_PDkC, slots_T in (inputs, device_inputs):
        reference.write_rows(k_TkC.to(k_PDkC.dtype), k_PDkC, slots_T)
        reference.write_rows(v_TkC.to(v_PDkC.dtype), v_PDkC, slots_T)
    for actual, wanted in zip(device_inputs, inputs, strict=True):
        assert actual.device.type == DEVICE
        assert torch.equal(actual.cpu(), wanted)
    assert not torch.equal(inputs[2], write_inputs(dtype, kv_dtype)[2])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("norms", [(True, True), (False, True), (False, False)], ids=str)
def test_rotate_equals_the_cpu(norms, dtype):
    qkv_TX, *weights, eps, cos_TR, sin_TR = rotation_inputs(dtype)
    weights = [weight if norm else None for weight, norm in zip(weights, norms, strict=True)]
    inputs = [qkv_TX, 3, 64, *weights, eps, cos_TR, sin_TR]
    expected = reference.rotate(*inputs)
    assert [part.shape for part in expected] == [(20, 9, 64), (20, 3, 64), (20, 3, 64)]
    # A number that was rounded to the other side is rotated once more: its size is that of its pair, up to 6 here.
    for actual, wanted in zip(reference.rotate(*on_device(inputs)), expected, strict=True):
        assert (actual.device.type, actual.dtype) == (DEVICE, dtype)
        torch.testing.assert_close(actual.cpu(), wanted, rtol=TOLERANCE[dtype], atol=6 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_linear_equals_the_cpu(dtype):
    inputs = linear_inputs(dtype)
    expected = reference.linear(*inputs)
    actual = reference.linear(*on_device(inputs))
    assert (actual.device.type, actual.dtype, actual.shape) == (DEVICE, torch.float32, (20, 40))
    # Inputs, gate, up, their product and the sum are each rounded, perhaps to the other side; gate and up are below 4.
    torch.testing.assert_close(actual.cpu(), expected, rtol=4 * TOLERANCE[dtype], atol=16 * TOLERANCE[dtype])


def test_torch_accepts_the_ops_on_the_device():
    ops, dtype = torch.ops.longhelix, torch.bfloat16
    q_TqC, k_PDkC, v_PDkC, *rest = attention_inputs(dtype, dtype)
    k_TkC, v_TkC, *_, slots_T = write_inputs(dtype, dtype)
    pool, format = pool_arguments(k_PDkC, v_PDkC)
    *product, activation, residual_TN, out_dtype = linear_inputs(dtype)
    product += [*activation_arguments(activation), residual_TN]
    for op, inputs in (
        (ops.partial_attention, (q_TqC, *pool, *rest, 150, 209, None, None, *format)),
        (ops.merge_states, (torch.randn(4, 7, 2, 32), torch.randn(4, 7, 2))),
        (ops.write_kv, (k_TkC, v_TkC, *pool, slots_T, *format)),
        (ops.rotate_and_write, (*rotation_inputs(dtype), *pool, slots_T, 3, *format)),
        (ops.linear, (*product, out_dtype, None, "bfloat16", 80, 96, "plain")),
        (ops.route, (torch.randn(20, 6), torch.randn(6), 6, 2, False, False, True, True, 3, 2, 2.5)),
        (ops.route, (torch.randn(20, 7), None, 6, 2, True, True, False, False, 1, 1, 1.0)),
    ):
        assert set(opcheck(op.default, tuple(on_device(list(inputs)))).values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_fused_ops_equal_the_cpu(dtype):
    *_, k_PDkC, v_PDkC, slots_T = write_inputs(dtype, dtype)
    rotation = rotation_inputs(dtype)
    cpu, device = layer_of(k_PDkC, v_PDkC), layer_of(*on_device([k_PDkC, v_PDkC]))
    expected_TqC = rotate_and_write(*rotation, cpu, slots_T)
    q_TqC = rotate_and_write(*on_device(rotation), device, slots_T.to(DEVICE))
    for actual, wanted in ((q_TqC, expected_TqC), (device.values, cpu.values)):
        torch.testing.assert_close(actual.cpu(), wanted, rtol=TOLERANCE[dtype], atol=6 * TOLERANCE[dtype])
    assert torch.equal(device.values[:, 1].cpu(), cpu.values[:, 1])
    x_TX, weight_NX, bias_N, norm_X, eps, activation, residual_TN, out_dtype = linear_inputs(dtype)
    results = []
    for place in ("cpu", DEVICE):
        weight = Weight(weight_NX.to(place), str(dtype).removeprefix("torch."), 80, 96, PLAIN)
        around = {"bias": bias_N.to(place), "norm": norm_X.to(place), "residual": residual_TN.to(place)}
        results.append(
            linear(x_TX.to(place), weight, **around, norm_eps=eps, activation=activation, dtype=out_dtype).cpu()
        )
    torch.testing.assert_close(results[1], results[0], rtol=4 * TOLERANCE[dtype], atol=16 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_experts_equal_the_cpu(dtype):
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    moe, name = MoE(6, 2, 40, shared_size=24, routing=Routing(shared_gate=True)), str(dtype).removeprefix("torch.")
    # Logits a quarter apart, or equal.
    logits_TX = torch.randint(-12, 13, (30, 7), generator=generator) / 4
    x_TH, norm, residual = random(30, 96) * 10, 1 + random(96), random(30, 96) * 10
    products = [(random(2 * width, 96), random(96, width)) for width in (40,) * 6 + (24,)]
    results = []
    for place in ("cpu", DEVICE):
        gate_up, down = (
            tuple(Weight(pair[side].to(place), name, *pair[side].shape, PLAIN) for pair in products) for side in (0, 1)
        )
        experts = Experts.of(tuple(range(7)), gate_up, down, 7, torch.device(place))
        taken = route(logits_TX.to(place), None, moe)
        around = {"norm": norm.to(place), "norm_eps": 1e-3, "residual": residual.to(place)}
        results.append((*taken, run_experts(x_TH.to(place), experts, *taken, **around), experts.rows_e))
    (weights_TY, experts_TY, out_TH, rows_e), on_device = results
    torch.testing.assert_close(on_device[0].cpu(), weights_TY)
    assert torch.equal(on_device[1].cpu(), experts_TY)
    torch.testing.assert_close(on_device[2].cpu(), out_TH, rtol=4 * TOLERANCE[dtype], atol=8 * TOLERANCE[dtype])
    assert torch.equal(on_device[3].cpu(), rows_e)
    assert rows_e[6] == 30
