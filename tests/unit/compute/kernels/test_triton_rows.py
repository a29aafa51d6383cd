"""Norms, gates and rotations in Triton: in Triton's interpreter, and on a CUDA device where there is one."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; it comes with torch for CUDA")

from test_native_attention import seeded
from test_triton import CUDA, FLOATS, ROUNDING

from longhelix.compute.kernels import reference
from longhelix.compute.kernels.triton import activate_rows, norm_rows, rotate
from longhelix.spec import Activation
from triton_interpreter import interpret

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module", params=["cpu", CUDA])
def device(request):
    """Where the kernels run: on the CPU in the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "cpu":
            interpret(patch)
        yield torch.device(request.param)


def normal(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed)).to(dtype).to(device)


def assert_near(found: Tensor, wanted: Tensor, roundings: int) -> None:
    """Off by so many roundings of each number, and by float32's own."""
    assert (found.shape, found.dtype, found.is_contiguous()) == (wanted.shape, wanted.dtype, True)
    rounding = 2 * roundings * ROUNDING[wanted.dtype] if wanted.dtype != torch.float32 else 2**-20
    torch.testing.assert_close(found, wanted, rtol=rounding, atol=2**-20, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 90), (2, 4096), (5, 5120), (0, 64), (2, 0)], ids=str)
def test_a_norm_equals_the_reference(shape, dtype, device):
    rows, channels = shape
    x_TX = normal(rows, channels + 7, dtype=dtype, device=device)[:, 7:] * 3  # rows with a distance
    weight_X = 1 + normal(channels, dtype=dtype, device=device, seed=1) / 4
    assert_near(norm_rows(x_TX, weight_X, 1e-5), reference.rms_norm(x_TX, weight_X, 1e-5), roundings=2)


def test_a_norm_of_one_row_has_the_same_bits_beside_others_and_a_nan_stays_in_its_row(device):
    x_TX, weight_X = normal(9, 300, dtype=torch.bfloat16, device=device), torch.ones(300, dtype=torch.bfloat16)
    weight_X, alone_X = weight_X.to(device), norm_rows(x_TX[4:5], weight_X.to(device), 1e-6)[0]
    x_TX[3, 17] = torch.nan
    found_TX = norm_rows(x_TX, weight_X, 1e-6)
    assert torch.equal(found_TX[4], alone_X)
    assert found_TX.isnan().any(1).tolist() == [row == 3 for row in range(9)]


def test_a_norm_in_float32_is_rounded_once(device):
    x_TX = normal(5, 300, dtype=torch.bfloat16, device=device)
    weight_X = 1 + normal(300, dtype=torch.float32, device=device, seed=1) / 300
    found_TX, wanted_TX = norm_rows(x_TX, weight_X, 1e-5), reference.rms_norm(x_TX, weight_X, 1e-5)
    assert found_TX.dtype == torch.bfloat16
    assert (found_TX == wanted_TX).float().mean() > 0.99
    assert (norm_rows(x_TX, weight_X.bfloat16(), 1e-5) == wanted_TX).float().mean() < 0.9


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 154), (2, 2 * 1024), (2, 2 * 1025), (0, 64), (2, 0)], ids=str)
def test_a_gate_equals_the_reference(shape, dtype, device):
    x_TX, swiglu = normal(*shape, dtype=dtype, device=device) * 20, Activation()
    assert_near(activate_rows(x_TX, swiglu), reference.activate(x_TX, swiglu), roundings=2)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("function", ["gelu", "gelu_tanh", "relu_squared", "clamped_swiglu"])
def test_an_activation_equals_the_reference(function, gated, dtype, device):
    x_TX, activation = normal(3, 154, dtype=dtype, device=device) * 4, Activation(function, gated)
    assert_near(activate_rows(x_TX, activation), reference.activate(x_TX, activation), roundings=2)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("norms", ["", "q", "k", "qk"])
@pytest.mark.parametrize("share", [1.0, 0.4, 0.0])
@pytest.mark.parametrize(("query_heads", "kv_heads", "size"), [(9, 3, 16), (1, 1, 128), (6, 2, 80)])
def test_a_rotation_equals_the_reference(query_heads, kv_heads, size, share, norms, dtype, device):
    heads = query_heads + 2 * kv_heads
    qkv_TX = normal(5, heads * size + 3, dtype=dtype, device=device)[:, :-3]
    q_norm, k_norm = (1 + normal(2, size, dtype=dtype, device=device, seed=1) / 4).to(dtype)
    angles_TR = torch.randn(5, int(size // 2 * share), generator=seeded(2)).to(device) * 3
    arguments = kv_heads, size, q_norm if "q" in norms else None, k_norm if "k" in norms else None, 1e-6
    found = rotate(qkv_TX, *arguments, angles_TR.cos(), angles_TR.sin())
    wanted = reference.rotate(qkv_TX, *arguments, angles_TR.cos(), angles_TR.sin())
    for place, (x_TQC, wanted_TQC) in enumerate(zip(found, wanted, strict=True)):
        if place == 2 or (not norms and device.type == "cpu"):
            assert torch.equal(x_TQC, wanted_TQC)
        else:  # a number that was rounded to the other side is rotated once more: its size is that of its pair
            bound = 2**-20 if dtype == torch.float32 else 16 * ROUNDING[dtype]
            torch.testing.assert_close(x_TQC, wanted_TQC, rtol=bound, atol=bound)


def test_a_rotation_of_no_rows_is_empty(device):
    nothing_TX, angles_TR = torch.empty(0, 5 * 16, device=device), torch.empty(0, 8, device=device)
    assert [x.shape for x in rotate(nothing_TX, 1, 16, None, None, 0.0, angles_TR, angles_TR)] == [
        (0, 3, 16),
        (0, 1, 16),
        (0, 1, 16),
    ]
