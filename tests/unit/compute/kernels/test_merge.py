import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from longhelix.compute.kernels import merge_states

pytestmark = pytest.mark.unit

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-2, torch.bfloat16: 3e-2, torch.float64: 1e-12}
# With inputs taken as they are, the result is off by one rounding to its dtype (and float32 arithmetic inside).
ONE_ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-11 + 2e-6, torch.bfloat16: 2**-8 + 2e-6, torch.float64: 1e-13}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def error(actual: Tensor, expected: Tensor) -> float:
    """max|d| / max|ref|, NaN if any element is NaN."""
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).abs().max() / expected.double().abs().max())


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_states(shape: tuple[int, int, int, int], seed: int, dtype: torch.dtype = torch.float32):
    """Partial outputs and LSEs of shards that all hold keys; outputs in `dtype`, LSEs in float32."""
    out_NTQC = torch.randn(shape, generator=seeded(seed)).to(dtype)
    return out_NTQC, torch.randn(shape[:3], generator=seeded(seed + 1)) * 4


def formula(out_NTQC: Tensor, lse_NTQ: Tensor) -> tuple[Tensor, Tensor]:
    """The merge in float64, for shards that all hold keys."""
    weight_NTQ = torch.exp(lse_NTQ.double() - lse_NTQ.double().max(dim=0).values)
    total_TQ = weight_NTQ.sum(0)
    out_TQC = torch.einsum("ntq,ntqc->tqc", weight_NTQ, out_NTQC.double()) / total_TQ[..., None]
    return out_TQC, lse_NTQ.double().max(dim=0).values + torch.log(total_TQ)


def split_softmax(cuts: list[int], rows: int, heads: int, dim: int, seed: int):
    """Float64 attention over keys cut at `cuts` into parts, and over all of them: (out_NTQC, lse_NTQ, out, lse)."""
    scores_STQ = torch.randn(cuts[-1], rows, heads, generator=seeded(seed), dtype=torch.float64) * 3
    v_STQC = torch.randn(cuts[-1], rows, heads, dim, generator=seeded(seed + 1), dtype=torch.float64)

    def attend(first: int, last: int) -> tuple[Tensor, Tensor]:
        weight_STQ = torch.exp(scores_STQ[first:last])
        total_TQ = weight_STQ.sum(0)
        out_TQC = torch.einsum("stq,stqc->tqc", weight_STQ, v_STQC[first:last])
        if first == last:
            return torch.full_like(out_TQC, math.nan), torch.full_like(total_TQ, -math.inf)
        return out_TQC / total_TQ[..., None], torch.log(total_TQ)

    parts = [attend(first, last) for first, last in itertools.pairwise(cuts)]
    return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]), *attend(0, cuts[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "cuts", [[0, 17, 40, 64, 96], [0, 1, 2, 3, 200], [0, 0, 30, 30, 31], [0, 50]], ids=["4", "uneven", "empty", "1"]
)
def test_merged_parts_equal_softmax_over_all_keys(cuts, dtype):
    out_NTQC, lse_NTQ, whole_TQC, whole_lse_TQ = split_softmax(cuts, rows=7, heads=2, dim=32, seed=5)
    out_TQC, lse_TQ = merge_states(out_NTQC.to(dtype), lse_NTQ.float())
    assert error(out_TQC, whole_TQC) <= TOLERANCE[dtype]
    assert error(lse_TQ, whole_lse_TQ) <= 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (4, 7, 2, 32),
        (4, 8, 2, 64),
        (8, 16, 4, 128),
        (16, 32, 8, 256),
        (16, 16, 64, 512),
        (1, 5, 3, 16),
        (128, 3, 2, 24),
        (256, 2, 3, 8),
    ],
    ids=str,
)
def test_merge_equals_the_float64_formula(shape, dtype):
    out_NTQC, lse_NTQ = random_states(shape, seed=sum(shape), dtype=dtype)
    out_TQC, lse_TQ = merge_states(out_NTQC, lse_NTQ)
    expected_TQC, expected_lse_TQ = formula(out_NTQC, lse_NTQ)
    assert error(out_TQC, expected_TQC) <= ONE_ROUNDING[dtype]
    assert error(lse_TQ, expected_lse_TQ) <= 1e-6


def test_lse_in_base_2_by_mistake_is_seen_by_the_comparison():
    out_NTQC, lse_NTQ, whole_TQC, whole_lse_TQ = split_softmax([0, 17, 40, 64, 96], rows=7, heads=2, dim=32, seed=5)
    out_TQC, lse_TQ = merge_states(out_NTQC.float(), lse_NTQ.float() / math.log(2))
    assert error(out_TQC, whole_TQC) > max(TOLERANCE.values())
    assert error(lse_TQ, whole_lse_TQ) > max(TOLERANCE.values())


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e4])
@pytest.mark.parametrize("empty", [[0], [3], [5], [1, 2, 4]], ids=str)
def test_an_empty_shard_changes_no_bit_whatever_its_output_holds(empty, poison):
    out_NTQC, lse_NTQ = random_states((6, 7, 2, 32), seed=11)
    full = [rank for rank in range(6) if rank not in empty]
    expected_TQC, expected_lse_TQ = merge_states(out_NTQC[full], lse_NTQ[full])
    out_NTQC[empty], lse_NTQ[empty] = poison, -math.inf
    out_TQC, lse_TQ = merge_states(out_NTQC, lse_NTQ)
    assert torch.equal(out_TQC, expected_TQC)
    assert torch.equal(lse_TQ, expected_lse_TQ)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_row_and_head_has_its_own_empty_shards(dtype):
    out_NTQC, lse_NTQ = random_states((5, 40, 3, 16), seed=12, dtype=dtype)
    empty_NTQ = torch.rand(lse_NTQ.shape, generator=seeded(13)) < 0.6
    assert empty_NTQ.all(0).any()
    assert (~empty_NTQ).all(0).any()
    out_TQC, lse_TQ = merge_states(
        out_NTQC.masked_fill(empty_NTQ[..., None], math.nan), lse_NTQ.masked_fill(empty_NTQ, -math.inf)
    )
    for row in range(40):
        for head in range(3):
            full = ~empty_NTQ[:, row, head]
            some = (full, slice(row, row + 1), slice(head, head + 1))
            if not full.any():
                assert torch.equal(out_TQC[row, head], torch.zeros(16, dtype=dtype))
                assert lse_TQ[row, head] == -math.inf
                continue
            expected_C, expected_lse = formula(out_NTQC[some], lse_NTQ[some])
            assert error(out_TQC[row, head], expected_C[0, 0]) <= ONE_ROUNDING[dtype]
            assert error(lse_TQ[row, head], expected_lse[0, 0]) <= 1e-5


def naive_merge(out_NTQC: Tensor, lse_NTQ: Tensor) -> Tensor:
    """The merge without a mask for empty shards: right until an empty shard's output is not finite."""
    weight_NTQ = lse_NTQ.softmax(0)
    return (weight_NTQ[..., None] * out_NTQC).sum(0)


def test_a_merge_without_the_mask_would_see_the_poison():
    out_NTQC, lse_NTQ = random_states((4, 7, 2, 32), seed=14)
    lse_NTQ[2] = -math.inf
    assert error(naive_merge(out_NTQC, lse_NTQ), merge_states(out_NTQC, lse_NTQ)[0]) <= 1e-5
    out_NTQC[2] = math.nan
    assert naive_merge(out_NTQC, lse_NTQ).isnan().all()
    assert merge_states(out_NTQC, lse_NTQ)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("ranks", [1, 4])
def test_all_shards_empty_give_zeros_and_minus_infinity(ranks, dtype):
    out_NTQC = torch.full((ranks, 7, 2, 32), math.nan, dtype=dtype)
    out_TQC, lse_TQ = merge_states(out_NTQC, torch.full((ranks, 7, 2), -math.inf))
    assert torch.equal(out_TQC, torch.zeros(7, 2, 32, dtype=dtype))
    assert torch.equal(lse_TQ, torch.full((7, 2), -math.inf))


def test_bits_equal_a_sequential_merge_in_rank_order():
    out_NTQC, lse_NTQ = random_states((6, 5, 3, 4), seed=15)
    lse_NTQ[1, 2], lse_NTQ[:, 3, 1] = -math.inf, -math.inf
    lse_NTQ[4, 4] += 30
    # exp and log have the bits of the platform; every other operation is written out below in single precision.
    largest = lse_NTQ.max(dim=0).values.nan_to_num(neginf=0.0)
    weights = np.stack([torch.exp(lse_TQ - largest).numpy() for lse_TQ in lse_NTQ])
    out, lse = out_NTQC.numpy(), lse_NTQ.numpy()
    merged, totals = np.zeros((5, 3, 4), np.float32), np.zeros((5, 3), np.float32)
    for row in range(5):
        for head in range(3):
            total, sums = np.float32(0), [np.float32(0)] * 4
            for rank in range(6):
                if lse[rank, row, head] == -np.inf:
                    continue
                weight = weights[rank, row, head]
                total = np.float32(total + weight)
                for channel in range(4):
                    part = np.float32(weight * out[rank, row, head, channel])
                    sums[channel] = np.float32(sums[channel] + part)
            totals[row, head] = total
            for channel in range(4):
                merged[row, head, channel] = np.float32(sums[channel] / total) if total else np.float32(0)
    out_TQC, lse_TQ = merge_states(out_NTQC, lse_NTQ)
    assert torch.equal(out_TQC, torch.from_numpy(merged))
    assert torch.equal(lse_TQ, largest + torch.from_numpy(totals).log())


def test_another_rank_order_changes_nothing_but_rounding():
    out_NTQC, lse_NTQ = random_states((16, 9, 4, 64), seed=16)
    expected_TQC, expected_lse_TQ = merge_states(out_NTQC, lse_NTQ)
    differs = False
    for seed in range(5):
        order = torch.randperm(16, generator=seeded(seed))
        out_TQC, lse_TQ = merge_states(out_NTQC[order], lse_NTQ[order])
        assert error(out_TQC, expected_TQC) <= 1e-6
        assert error(lse_TQ, expected_lse_TQ) <= 1e-6
        differs |= not torch.equal(out_TQC, expected_TQC)
    assert differs, "if no order changes a bit, the sum is not in float32 and in rank order"


def test_the_same_inputs_give_the_same_bits_with_any_number_of_threads():
    out_NTQC, lse_NTQ = random_states((8, 64, 16, 64), seed=17)
    first_TQC, first_lse_TQ = merge_states(out_NTQC, lse_NTQ)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, threads):
            torch.set_num_threads(count)
            out_TQC, lse_TQ = merge_states(out_NTQC.clone(), lse_NTQ.clone())
            assert torch.equal(out_TQC, first_TQC)
            assert torch.equal(lse_TQ, first_lse_TQ)
    finally:
        torch.set_num_threads(threads)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    empty=st.integers(0, 2**20 - 1),
    seed=st.integers(0, 2**31),
)
def test_merging_in_groups_equals_merging_at_once(sizes, empty, seed):
    out_NTQC, lse_NTQ = random_states((sum(sizes), 3, 2, 8), seed)
    for rank in range(sum(sizes)):
        if empty >> rank & 1:
            out_NTQC[rank], lse_NTQ[rank] = math.nan, -math.inf
    groups = [merge_states(*part) for part in zip(out_NTQC.split(sizes), lse_NTQ.split(sizes), strict=True)]
    out_TQC, lse_TQ = merge_states(torch.stack([out for out, _ in groups]), torch.stack([lse for _, lse in groups]))
    expected_TQC, expected_lse_TQ = merge_states(out_NTQC, lse_NTQ)
    torch.testing.assert_close(out_TQC, expected_TQC, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse_TQ, expected_lse_TQ, rtol=1e-6, atol=1e-5)


def test_float64_is_merged_in_float64():
    out_NTQC, lse_NTQ, whole_TQC, whole_lse_TQ = split_softmax([0, 17, 17, 64, 96], rows=7, heads=2, dim=32, seed=18)
    out_TQC, lse_TQ = merge_states(out_NTQC, lse_NTQ)
    assert out_TQC.dtype == lse_TQ.dtype == torch.float64
    assert error(out_TQC, whole_TQC) <= 1e-14
    assert error(lse_TQ, whole_lse_TQ) <= 1e-14


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("lse_dtype", [*DTYPES, torch.float64])
def test_dtypes_and_shapes_out_are_those_that_went_in(dtype, lse_dtype):
    out_NTQC, lse_NTQ = random_states((4, 7, 2, 32), seed=19)
    out_NTQC, lse_NTQ = out_NTQC.to(dtype), lse_NTQ.to(lse_dtype)
    out_TQC, lse_TQ = merge_states(out_NTQC, lse_NTQ)
    assert (out_TQC.dtype, out_TQC.shape) == (dtype, (7, 2, 32))
    assert (lse_TQ.dtype, lse_TQ.shape) == (lse_dtype, (7, 2))
    expected_TQC, expected_lse_TQ = formula(out_NTQC, lse_NTQ)
    assert error(out_TQC, expected_TQC) <= 1e-2
    assert error(lse_TQ, expected_lse_TQ) <= 1e-2


@pytest.mark.parametrize("lse_dtype", [torch.float16, torch.bfloat16])
def test_weights_are_float32_whatever_the_dtype_of_the_lse(lse_dtype):
    out_NTQC, lse_NTQ = random_states((4, 50, 2, 32), seed=20)
    out_TQC, _ = merge_states(out_NTQC, lse_NTQ.to(lse_dtype))
    assert error(out_TQC, formula(out_NTQC, lse_NTQ.to(lse_dtype))[0]) <= 1e-5


def test_weights_are_float64_for_float64_outputs_and_float32_lse():
    out_NTQC, lse_NTQ = random_states((4, 50, 2, 32), seed=20, dtype=torch.float64)
    out_TQC, _ = merge_states(out_NTQC, lse_NTQ)
    assert error(out_TQC, formula(out_NTQC, lse_NTQ)[0]) <= 1e-12


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [1e4, -1e4, 3e38, -3e38, 0.0])
def test_huge_and_tiny_lse_stay_finite(shift, dtype):
    out_NTQC, lse_NTQ = random_states((4, 7, 2, 32), seed=21, dtype=dtype)
    lse_NTQ = lse_NTQ.round() + shift  # integers: the shift by 1e4 is exact
    out_TQC, lse_TQ = merge_states(out_NTQC, lse_NTQ)
    expected_TQC, expected_lse_TQ = formula(out_NTQC, lse_NTQ)
    assert error(out_TQC, expected_TQC) <= ONE_ROUNDING[dtype]
    assert error(lse_TQ, expected_lse_TQ) <= 1e-6


def test_a_shard_far_above_the_others_wins_alone():
    out_NTQC, lse_NTQ = random_states((4, 7, 2, 32), seed=22)
    lse_NTQ[0], lse_NTQ[1], lse_NTQ[2], lse_NTQ[3] = -1e4, 1e4, 0.0, -math.inf
    out_TQC, lse_TQ = merge_states(out_NTQC, lse_NTQ)
    assert torch.equal(out_TQC, out_NTQC[1])
    assert torch.equal(lse_TQ, lse_NTQ[1])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("shape", [(4, 7, 2, 32), (1, 3, 2, 8), (3, 0, 2, 8), (3, 5, 0, 8)], ids=str)
def test_torch_accepts_the_op_and_its_fake(shape, dtype):
    out_NTQC, lse_NTQ = random_states(shape, seed=23, dtype=dtype)
    results = opcheck(torch.ops.longhelix.merge_states.default, (out_NTQC, lse_NTQ))
    assert set(results.values()) == {"SUCCESS"}


def test_the_fake_of_permuted_inputs_has_the_strides_of_the_op():
    def strides() -> list[tuple[int, ...]]:
        out_NQTC, lse_NQT = torch.zeros(4, 2, 7, 32), torch.zeros(4, 2, 7)
        return [result.stride() for result in merge_states(out_NQTC.transpose(1, 2), lse_NQT.transpose(1, 2))]

    with FakeTensorMode():
        fake_strides = strides()
    assert fake_strides == strides()


def test_permuted_inputs_give_the_values_of_contiguous_ones():
    out_NQTC, lse_NQT = random_states((4, 2, 7, 32), seed=24)
    out_NTQC, lse_NTQ = out_NQTC.transpose(1, 2), lse_NQT.transpose(1, 2)
    out_TQC, lse_TQ = merge_states(out_NTQC, lse_NTQ)
    expected_TQC, expected_lse_TQ = merge_states(out_NTQC.contiguous(), lse_NTQ.contiguous())
    torch.testing.assert_close(out_TQC, expected_TQC, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse_TQ, expected_lse_TQ, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fakes_have_the_shapes_and_dtypes_of_the_op(dtype):
    with FakeTensorMode():
        out_TQC, lse_TQ = merge_states(torch.empty(4, 7, 2, 32, dtype=dtype), torch.empty(4, 7, 2))
    assert (out_TQC.shape, out_TQC.dtype) == ((7, 2, 32), dtype)
    assert (lse_TQ.shape, lse_TQ.dtype) == ((7, 2), torch.float32)
