"""The Triton kernels on a CUDA device: all that holds in the interpreter, and what only a device can show."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("this machine has no CUDA device that torch can use", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed; it comes with torch for CUDA")

from triton_checks import *  # noqa: F403
from triton_checks import Call, Case, bits, partial_attention, split_at

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda")


def on_device(call: Call) -> Call:
    return Call(*[value.to("cuda") if torch.is_tensor(value) else value for value in call])


def mixed_call(limits: list[list[int]], seed: int = 0) -> Call:
    dtype = torch.bfloat16
    return on_device(Case(limits, 2, 8, 128, 128, dtype=dtype, pool_dtype=dtype, seed=seed).call())


def test_nothing_is_read_back_from_the_device():
    call = mixed_call([[300], [*range(40)], [500, 501]])
    with split_at(256):
        partial_attention(*call)  # compiles and loads
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            partial_attention(*call)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_graph_replays_with_other_tokens_rows_and_limits():
    """Captured over two decodes and a chunk; replayed where the chunk is a decode and the decodes see less."""
    captured = mixed_call([[300], [*range(460, 500)], [500, 501]])
    inputs = Call(*[value.clone() if torch.is_tensor(value) else value for value in captured])
    other = captured._replace(
        row_starts_B=torch.tensor([0, 3, 4, 43], device="cuda"),
        limits_T=torch.tensor([1, 0, 299, 77, *range(300, 339)], device="cuda"),
        extents_B2=captured.extents_B2.flip(0).contiguous(),
        q_TqC=captured.q_TqC.flip(0).contiguous(),
        kv_PADkC=captured.kv_PADkC.nan_to_num(),
    )
    with split_at(256):
        partial_attention(*inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out_TqV, lse_Tq = partial_attention(*inputs)
        for call in (captured, other, captured):
            for mine, value in zip(inputs, call, strict=True):
                if torch.is_tensor(mine):
                    mine.copy_(value)
            out_TqV.fill_(torch.nan)
            graph.replay()
            expected_TqV, expected_lse_Tq = partial_attention(*call)
            assert torch.equal(bits(out_TqV), bits(expected_TqV))
            assert torch.equal(bits(lse_Tq), bits(expected_lse_Tq))
            assert not out_TqV.isnan().any()


@pytest.mark.parametrize("repeat", range(3))
def test_the_same_inputs_give_the_same_bits(repeat):
    call = mixed_call([[9000], [*range(3000, 3100)], [5000, 5001]], seed=repeat)
    first = partial_attention(*call)
    for _ in range(5):
        again = partial_attention(*call)
        assert torch.equal(bits(again[0]), bits(first[0]))
        assert torch.equal(bits(again[1]), bits(first[1]))
