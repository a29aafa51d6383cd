import itertools
import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

from block_extents import side_by_side
from longhelix.compute.kernels import (
    PLAIN,
    ROWS,
    KVFormat,
    KVLayer,
    Weight,
    linear,
    merge_states,
    partial_attention,
    rotate_and_write,
    write_kv,
)
from longhelix.scheduler.kv.placement import Growing, Local, Placement, Striped
from tiers import few

pytestmark = pytest.mark.unit

KV_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Shape:
    """k KV heads, query heads per KV head, C channels, D tokens of a KV block."""

    kv_heads: int = 2
    group: int = 3
    head_size: int = 16
    block_tokens: int = 4


@dataclass
class Sequence:
    """One sequence in the plain: its keys and values (S, k, C) in order, its rows, and how many keys each row sees."""

    q_TqC: Tensor
    k_SkC: Tensor
    v_SkC: Tensor
    limits: list[int]


def make_sequence(shape: Shape, limits: list[int], generator: torch.Generator, kv_dtype=torch.float32) -> Sequence:
    def normal(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, shape.head_size, generator=generator)

    length = max(limits, default=0)
    return Sequence(
        normal(len(limits), shape.kv_heads * shape.group),
        normal(length, shape.kv_heads).to(kv_dtype),
        normal(length, shape.kv_heads).to(kv_dtype),
        limits,
    )


def rows_format(dtype: torch.dtype, block_tokens: int, kv_heads: int, head_size: int) -> KVFormat:
    return KVFormat(str(dtype).removeprefix("torch."), block_tokens, kv_heads, head_size, head_size, ROWS)


def page(sequences: list[Sequence], shape: Shape, seed: int) -> tuple[KVLayer, Tensor, Tensor]:
    """A pool in rows that holds NaN wherever no key lies, blocks in shuffled order, blocks_X and extents_B2."""
    counts = [math.ceil(len(sequence.k_SkC) / shape.block_tokens) for sequence in sequences]
    ids = list(range(sum(counts) + 3))
    random.Random(seed).shuffle(ids)
    format = rows_format(sequences[0].k_SkC.dtype, shape.block_tokens, shape.kv_heads, shape.head_size)
    layer = format.new_layer(len(ids), torch.device("cpu"))
    layer.values.fill_(math.nan)
    k_PDkC, v_PDkC = layer.keys_and_values()
    blocks = [torch.tensor([ids.pop() for _ in range(count)], dtype=torch.int64) for count in counts]
    for blocks_J, sequence in zip(blocks, sequences, strict=True):
        for token in range(len(sequence.k_SkC)):
            place = blocks_J[token // shape.block_tokens], token % shape.block_tokens
            k_PDkC[place], v_PDkC[place] = sequence.k_SkC[token], sequence.v_SkC[token]
    return layer, *side_by_side(blocks, other=ids[0])


def pack(sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor]:
    """q_TqC, row_starts_B and limits_T of rows packed one sequence after the other."""
    starts = [0, *itertools.accumulate(len(sequence.limits) for sequence in sequences)]
    limits = [limit for sequence in sequences for limit in sequence.limits]
    q_TqC = torch.cat([sequence.q_TqC for sequence in sequences])
    return q_TqC, torch.tensor(starts), torch.tensor(limits, dtype=torch.int64)


def arguments(sequences: list[Sequence], shape: Shape, seed: int = 0, scale: float | None = None) -> tuple:
    q_TqC, row_starts_B, limits_T = pack(sequences)
    scale = shape.head_size**-0.5 if scale is None else scale
    return q_TqC, *page(sequences, shape, seed), row_starts_B, limits_T, scale


def softmax_attention(sequences: list[Sequence], scale: float, cap: float = math.inf) -> tuple[Tensor, Tensor]:
    """Float64, row by row and head by head: out_TqC and lse_Tq."""
    outs, lses = [], []
    for sequence in sequences:
        group = sequence.q_TqC.shape[1] // sequence.k_SkC.shape[1]
        for q_qC, limit in zip(sequence.q_TqC.double(), sequence.limits, strict=True):
            for head, q_C in enumerate(q_qC):
                if limit == 0:
                    outs.append(torch.zeros_like(q_C))
                    lses.append(torch.tensor(-math.inf, dtype=torch.float64))
                    continue
                scores_S = sequence.k_SkC[:limit, head // group].double() @ q_C * scale
                scores_S = scores_S if cap == math.inf else cap * (scores_S / cap).tanh()
                weights_S = torch.exp(scores_S - scores_S.max())
                outs.append(weights_S @ sequence.v_SkC[:limit, head // group].double() / weights_S.sum())
                lses.append(scores_S.max() + weights_S.sum().log())
    heads = sequences[0].q_TqC.shape[1:]
    if not outs:
        return torch.zeros(0, *heads, dtype=torch.float64), torch.zeros(0, heads[0], dtype=torch.float64)
    return torch.stack(outs).view(-1, *heads), torch.stack(lses).view(-1, heads[0])


def assert_equals_softmax(
    result: tuple[Tensor, Tensor], sequences: list[Sequence], scale: float, tolerance=1e-5, cap: float = math.inf
) -> None:
    out_TqC, lse_Tq = result
    expected_TqC, expected_lse_Tq = softmax_attention(sequences, scale, cap)
    assert lse_Tq.dtype == torch.float32
    torch.testing.assert_close(out_TqC.double(), expected_TqC, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse_Tq.double(), expected_lse_Tq, rtol=1e-6, atol=1e-5)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


shapes = st.builds(
    Shape,
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7]),
    head_size=st.sampled_from([16, 24, 64, 80, 128]),
    block_tokens=st.sampled_from([1, 2, 16]),
)


@given(
    shape=shapes,
    limits=st.lists(st.lists(st.integers(0, 40), max_size=5), min_size=1, max_size=4),
    kv_dtype=st.sampled_from(KV_DTYPES),
    seed=st.integers(0, 2**31),
)
def test_equals_softmax_for_any_shape_and_no_unseen_token_leaks(shape, limits, kv_dtype, seed):
    generator = seeded(seed)
    sequences = [make_sequence(shape, rows, generator, kv_dtype) for rows in limits]
    result = partial_attention(*arguments(sequences, shape, seed))
    assert_equals_softmax(result, sequences, shape.head_size**-0.5)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_one_token_gives_its_value_and_its_score(kv_dtype):
    shape = Shape(kv_heads=2, group=3, head_size=64, block_tokens=16)
    sequence = make_sequence(shape, [1], seeded(1), kv_dtype)
    out_TqC, lse_Tq = partial_attention(*arguments([sequence], shape))
    assert torch.equal(out_TqC[0], sequence.v_SkC[0].float().repeat_interleave(3, dim=0))
    scores_q = (sequence.q_TqC[0] * sequence.k_SkC[0].float().repeat_interleave(3, dim=0)).sum(-1) / 8
    torch.testing.assert_close(lse_Tq[0], scores_q, rtol=1e-5, atol=1e-5)


def test_rows_with_limit_0_give_zeros_and_minus_infinity_among_rows_that_see_keys():
    shape = Shape(block_tokens=2)
    sequences = [make_sequence(shape, limits, seeded(2)) for limits in ([0, 3, 0, 5], [0, 0], [], [1, 0])]
    out_TqC, lse_Tq = partial_attention(*arguments(sequences, shape))
    unseeing = torch.tensor([0, 2, 4, 5, 7])
    assert torch.equal(out_TqC[unseeing], torch.zeros(5, 6, 16))
    assert torch.equal(lse_Tq[unseeing], torch.full((5, 6), -math.inf))
    assert_equals_softmax((out_TqC, lse_Tq), sequences, 0.25)


@pytest.mark.parametrize("limits", [[[]], [[], []], [[0, 0]], [[0], [], [0]]], ids=str)
def test_a_rank_without_keys_or_rows_needs_no_blocks(limits):
    shape = Shape()
    sequences = [make_sequence(shape, rows, seeded(3)) for rows in limits]
    q_TqC, layer, _, extents_B2, *rest = arguments(sequences, shape)
    assert not extents_B2.diff().any()
    out_TqC, lse_Tq = partial_attention(q_TqC, layer, torch.empty(0, dtype=torch.int64), extents_B2, *rest)
    rows = sum(map(len, limits))
    assert torch.equal(out_TqC, torch.zeros(rows, 6, 16))
    assert torch.equal(lse_Tq, torch.full((rows, 6), -math.inf))


@pytest.mark.parametrize("rows", [127, 128, 129, 300])
def test_many_rows_equal_softmax_across_tiles(rows):
    shape = Shape(kv_heads=1, group=2, head_size=16, block_tokens=16)
    prefill = make_sequence(shape, [min(38 + row // 2, 140) for row in range(rows)], seeded(4))
    decode = make_sequence(shape, [9], seeded(5))
    assert_equals_softmax(
        partial_attention(*arguments([decode, prefill, decode], shape)), [decode, prefill, decode], 0.25
    )


def test_whole_tiles_may_see_nothing_and_limits_may_fall():
    shape = Shape(kv_heads=1, group=2, head_size=16, block_tokens=16)
    sequence = make_sequence(shape, [0] * 130 + [33] * 100 + [17] * 60 + [0] * 140, seeded(6))
    assert_equals_softmax(partial_attention(*arguments([sequence], shape)), [sequence], 0.25)


def test_one_token_beyond_the_limit_would_be_seen():
    shape = Shape(block_tokens=16)
    sequences = [make_sequence(shape, [5], seeded(7)), make_sequence(shape, [4], seeded(8))]
    q_TqC, layer, *table, row_starts_B, limits_T, scale = arguments(sequences, shape)
    beyond_T = limits_T + torch.tensor([1, 0])
    out_TqC, _ = partial_attention(q_TqC, layer, *table, row_starts_B, beyond_T, scale)
    assert out_TqC[0].isnan().all()
    assert out_TqC[1].isfinite().all()


def test_a_limit_in_the_middle_hides_later_keys_of_the_same_tile():
    shape = Shape(block_tokens=4)
    sequence = make_sequence(shape, [6, 13], seeded(9))
    changed = Sequence(sequence.q_TqC, sequence.k_SkC.clone(), sequence.v_SkC.clone(), sequence.limits)
    changed.k_SkC[6:], changed.v_SkC[6:] = 50, -1e6
    out_TqC, lse_Tq = partial_attention(*arguments([sequence], shape))
    changed_TqC, changed_lse_Tq = partial_attention(*arguments([changed], shape))
    assert torch.equal(changed_TqC[0], out_TqC[0])
    assert torch.equal(changed_lse_Tq[0], lse_Tq[0])
    assert not torch.equal(changed_TqC[1], out_TqC[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_queries_give_half_outputs_rounded_once_and_float32_lse(dtype):
    shape = Shape(kv_heads=2, group=3, head_size=64, block_tokens=16)
    sequences = [make_sequence(shape, limits, seeded(10), dtype) for limits in ([20, 21, 22], [1], [40])]
    for sequence in sequences:
        sequence.q_TqC = sequence.q_TqC.to(dtype)
    out_TqC, lse_Tq = partial_attention(*arguments(sequences, shape))
    assert out_TqC.dtype == dtype
    assert_equals_softmax((out_TqC, lse_Tq), sequences, 1 / 8, tolerance=torch.finfo(dtype).eps / 2 + 1e-5)


def test_the_scale_is_the_one_given():
    shape = Shape()
    sequence = make_sequence(shape, [11, 12], seeded(11))
    assert_equals_softmax(partial_attention(*arguments([sequence], shape, scale=0.7)), [sequence], 0.7)
    assert_equals_softmax(partial_attention(*arguments([sequence], shape, scale=0.0)), [sequence], 0.0)


@pytest.mark.parametrize("cap", [0.5, 3.0, 50.0])
def test_scores_are_capped(cap):
    shape = Shape()
    sequences = [make_sequence(shape, limits, seeded(13)) for limits in ([11, 12], [0, 30])]
    found = partial_attention(*arguments(sequences, shape, scale=0.7), cap=cap)
    assert_equals_softmax(found, sequences, 0.7, cap=cap)


@pytest.mark.parametrize("size", [1e3, 1e6, 1e15])
def test_large_scores_do_not_overflow(size):
    shape = Shape()
    sequence = make_sequence(shape, [20, 21], seeded(12))
    # Powers of two: products and sums are exact, so that the comparison sees the softmax and not the dot product.
    sequence.q_TqC = (sequence.q_TqC.sign() * 2.0 ** round(math.log2(size))).float()
    sequence.k_SkC = sequence.k_SkC.sign()
    sequence.k_SkC[3] = sequence.q_TqC[0, ::3].sign()  # the one best key of row 0, head 0 of each group
    out_TqC, lse_Tq = partial_attention(*arguments([sequence], shape))
    expected_TqC, expected_lse_Tq = softmax_attention([sequence], 0.25)
    assert out_TqC.isfinite().all()
    torch.testing.assert_close(out_TqC[0, ::3].double(), expected_TqC[0, ::3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse_Tq.double(), expected_lse_Tq, rtol=1e-6, atol=0)


@pytest.mark.parametrize("size", [1.0, 100.0, 1e4, 1e6])
def test_weights_sum_to_one_whatever_the_size_of_the_scores(size):
    shape = Shape(kv_heads=1, group=1, head_size=16, block_tokens=16)
    for limit in range(1, 40):
        sequence = make_sequence(shape, [limit], seeded(13))
        sequence.q_TqC.zero_()[..., 0] = size
        sequence.k_SkC[:], sequence.v_SkC[:] = 1, 1
        out_TqC, _ = partial_attention(*arguments([sequence], shape, scale=1.0))
        torch.testing.assert_close(out_TqC, torch.ones_like(out_TqC), rtol=1e-5, atol=0)


@pytest.mark.parametrize("reach", [0, 1])
def test_the_same_inputs_give_the_same_bits(reach):
    shape = Shape(kv_heads=3, group=3, head_size=64, block_tokens=16)
    sequences = [make_sequence(shape, [*range(reach, 150)], seeded(14)), make_sequence(shape, [77], seeded(15))]
    out_TqC, lse_Tq = partial_attention(*arguments(sequences, shape))
    for _ in range(3):
        again_TqC, again_lse_Tq = partial_attention(*arguments(sequences, shape))
        assert torch.equal(again_TqC, out_TqC)
        assert torch.equal(again_lse_Tq, lse_Tq)


def test_which_blocks_hold_the_keys_changes_no_bit():
    shape = Shape(kv_heads=2, group=3, head_size=32, block_tokens=2)
    sequences = [make_sequence(shape, limits, seeded(16)) for limits in ([30, 31, 32], [7], [19, 20])]
    first = partial_attention(*arguments(sequences, shape, seed=0))
    second = partial_attention(*arguments(sequences, shape, seed=1))
    assert not torch.equal(page(sequences, shape, seed=0)[1], page(sequences, shape, seed=1)[1])
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])


def test_queries_may_be_a_slice_of_a_fused_projection():
    shape = Shape()
    sequence = make_sequence(shape, [9, 10, 11], seeded(17))
    q_TqC, *rest = arguments([sequence], shape)
    fused_TXC = torch.full((3, 10, 16), math.nan)
    fused_TXC[:, 2:8] = q_TqC
    turned_qTC = q_TqC.transpose(0, 1).contiguous()
    expected = partial_attention(q_TqC, *rest)
    for view_TqC in (fused_TXC[:, 2:8], turned_qTC.transpose(0, 1)):
        assert not view_TqC.is_contiguous()
        result = partial_attention(view_TqC, *rest)
        torch.testing.assert_close(result[0], expected[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(result[1], expected[1], rtol=1e-6, atol=1e-6)


@dataclass(frozen=True)
class Request:
    """A request whose last `rows` tokens are this step's queries; KV spreads over ranks by `placement`."""

    placement: Placement
    length: int
    rows: int


@st.composite
def requests(draw, kvp: int, block_tokens: int) -> Request:
    start = draw(st.integers(0, kvp - 1))
    placement = draw(
        st.sampled_from(
            [
                Striped(kvp, block_tokens, start),
                Local(kvp, block_tokens, start),
                Growing(kvp, block_tokens, block_tokens * draw(st.integers(1, 3)), start),
            ]
        )
    )
    length = draw(st.integers(1, 70))
    return Request(placement, length, draw(st.integers(1, min(length, 9))))


@st.composite
def sharded_batches(draw) -> tuple[int, int, list[Request]]:
    kvp, block_tokens = draw(st.integers(1, 6)), draw(st.sampled_from([1, 2, 4, 16]))
    return kvp, block_tokens, draw(st.lists(requests(kvp, block_tokens), min_size=1, max_size=3))


def token_owners(placement: Placement, block_tokens: int, length: int) -> list[int]:
    """The owner of each token, by walking the owner list."""
    owners: list[int] = []
    for _ in range(math.ceil(length / block_tokens)):
        owners.append(placement.next_owner(owners[-1] if owners else 0, len(owners)))
    return [owners[token // block_tokens] for token in range(length)]


@given(batch=sharded_batches(), group=st.sampled_from([1, 3]), seed=st.integers(0, 2**31))
def test_attention_split_over_ranks_by_any_placement_merges_to_the_whole(batch, group, seed):
    kvp, block_tokens, batch_requests = batch
    shape = Shape(kv_heads=2, group=group, head_size=16, block_tokens=block_tokens)
    generator = seeded(seed)
    whole = [
        make_sequence(shape, [*range(request.length - request.rows + 1, request.length + 1)], generator)
        for request in batch_requests
    ]
    states = []
    for rank in range(kvp):
        local = []
        for request, sequence in zip(batch_requests, whole, strict=True):
            owners = token_owners(request.placement, block_tokens, request.length)
            mine = [token for token, owner in enumerate(owners) if owner == rank]
            limits = [request.placement.local_length(rank, limit) for limit in sequence.limits]
            local.append(Sequence(sequence.q_TqC, sequence.k_SkC[mine], sequence.v_SkC[mine], limits))
        out_TqC, lse_Tq = partial_attention(*arguments(local, shape, seed + rank))
        assert_equals_softmax((out_TqC, lse_Tq), local, 0.25)
        states.append((out_TqC.masked_fill(lse_Tq.unsqueeze(-1) == -math.inf, math.nan), lse_Tq))
    merged = merge_states(torch.stack([out for out, _ in states]), torch.stack([lse for _, lse in states]))
    assert_equals_softmax(merged, whole, 0.25)
    unsplit = partial_attention(*arguments(whole, shape, seed))
    torch.testing.assert_close(merged[0], unsplit[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged[1], unsplit[1], rtol=1e-6, atol=1e-5)


def test_a_limit_one_token_short_on_one_rank_is_seen_after_the_merge():
    shape = Shape()
    placement = Striped(kvp=3, block_tokens=4)
    whole = make_sequence(shape, [29], seeded(18))
    states = []
    for rank in range(3):
        mine = [token for token in range(29) if placement.owner(token) == rank]
        limits = [placement.local_length(rank, 29) - (rank == 1)]
        local = Sequence(whole.q_TqC, whole.k_SkC[mine], whole.v_SkC[mine], limits)
        states.append(partial_attention(*arguments([local], shape)))
    merged = merge_states(torch.stack([out for out, _ in states]), torch.stack([lse for _, lse in states]))
    with pytest.raises(AssertionError):
        assert_equals_softmax(merged, [whole], 0.25)


@pytest.mark.parametrize("q_dtype", few([torch.bfloat16, torch.float32]))
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_torch_accepts_the_op_and_its_fake(q_dtype, kv_dtype):
    shape = Shape()
    sequences = [make_sequence(shape, rows, seeded(19), kv_dtype) for rows in ([5, 6], [0], [9])]
    q_TqC, layer, *table, row_starts_B, limits_T, scale = arguments(sequences, shape)
    pool = layer.values, layer.scales
    format = layer.format.arrangement.name, layer.format.dtype, layer.format.value_size, False, False
    fused_TXC = torch.cat((q_TqC, q_TqC), dim=1).to(q_dtype)
    turned_TqC = q_TqC.to(q_dtype).transpose(0, 1).contiguous().transpose(0, 1)
    for view_TqC in (q_TqC.to(q_dtype), fused_TXC[:, 3:9], turned_TqC, q_TqC.to(q_dtype)[:0]):
        starts_B = row_starts_B if len(view_TqC) else torch.zeros(4, dtype=torch.int64)
        rows = *table, starts_B, limits_T[: len(view_TqC)]
        firsts_T = torch.ones_like(limits_T)[: len(view_TqC)]
        for most in ((None, None, None, None), (2, 9, None, 5.0), (2, 9, firsts_T, None)):
            call = (view_TqC, *pool, *rows, scale, *most, *format)
            assert set(opcheck(torch.ops.longhelix.partial_attention.default, call).values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shared_values", [False, True])
def test_fakes_have_the_shapes_and_dtypes_of_the_op(shared_values, dtype):
    with FakeTensorMode():
        format = KVFormat("float16", 16, 2, 64, 48, ROWS, shared_values=shared_values)
        layer = KVLayer(format, torch.empty(9, 2, 16, 2, 64, dtype=torch.float16), None)
        table = torch.empty(12, dtype=torch.int64), torch.empty(3, 2, dtype=torch.int64)
        starts, limits = torch.empty(4, dtype=torch.int64), torch.empty(7, dtype=torch.int64)
        q_TqC = torch.empty(7, 6, 64, dtype=dtype)
        out_TqC, lse_Tq = partial_attention(q_TqC, layer, *table, starts, limits, 0.125)
    assert (out_TqC.shape, out_TqC.dtype) == ((7, 6, 48), dtype)
    assert (lse_Tq.shape, lse_Tq.dtype) == ((7, 6), torch.float32)


def test_shared_values_are_the_first_channels_of_the_keys():
    shape = Shape(kv_heads=1, group=4, head_size=24, block_tokens=4)
    sequences = [make_sequence(shape, limits, seeded(22)) for limits in ([9, 10, 11], [0], [6])]
    q_TqC, layer, *rest = arguments(sequences, shape)
    format = KVFormat("float32", 4, 1, 24, 16, ROWS, shared_values=True)
    result = partial_attention(q_TqC, KVLayer(format, layer.values[:, :1], None), *rest)
    for sequence in sequences:
        sequence.v_SkC = sequence.k_SkC
    expected_TqC, expected_lse_Tq = softmax_attention(sequences, 24**-0.5)
    torch.testing.assert_close(result[0].double(), expected_TqC[..., :16], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result[1].double(), expected_lse_Tq, rtol=1e-6, atol=1e-5)


def one_layer(x_TH, qkv_XH, cos_TR, sin_TR, pool_PADkC, slots_T, k_TkC, v_TkC, old_slots_T, *reads):
    """Attention of one layer on one rank, with the pool's older half as the other part of a merge of two."""
    blocks_X, *rest = reads
    layer = KVLayer(rows_format(pool_PADkC.dtype, 4, 2, 16), pool_PADkC, None)
    qkv_TX = linear(x_TH, Weight(qkv_XH, "float32", *qkv_XH.shape, PLAIN))
    q_TqC = rotate_and_write(qkv_TX, None, None, 0.0, cos_TR, sin_TR, layer, slots_T)
    write_kv(k_TkC, v_TkC, layer, old_slots_T)
    new = partial_attention(q_TqC * 2, layer, blocks_X, *rest, 0.25)
    old = partial_attention(q_TqC * 2, layer, blocks_X + 2, *rest, 0.25)
    out_TqC, lse_Tq = merge_states(torch.stack((new[0], old[0])), torch.stack((new[1], old[1])))
    return out_TqC + 1, lse_Tq


OPS_OF_A_LAYER = ["linear", "rotate_and_write", "write_kv", "partial_attention", "partial_attention", "merge_states"]
POOL = 4  # where `layer_inputs` has it


def layer_inputs() -> list[Tensor]:
    x_TH, qkv_XH = torch.randn(5, 12, generator=seeded(20)), torch.randn(10 * 16, 12, generator=seeded(23)) / 4
    angles_TR = torch.randn(5, 8, generator=seeded(24)) * 3
    k_TkC, v_TkC = torch.randn(5, 4, 16, generator=seeded(25)).split((2, 2), dim=1)
    pool_PADkC = torch.randn(4, 2, 4, 2, 16, generator=seeded(21))
    slots_T, old_slots_T = torch.tensor([0, 1, -1, 4, 5]), torch.tensor([-1, 9, -1, 12, -1])
    reads = torch.tensor([0, 1]), torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, 3, 5]), torch.tensor([1, 2, 2, 1, 2])
    return [x_TH, qkv_XH, angles_TR.cos(), angles_TR.sin(), pool_PADkC, slots_T, k_TkC, v_TkC, old_slots_T, *reads]


def test_the_layer_function_is_right_before_it_is_compiled():
    inputs = layer_inputs()
    x_TH, qkv_XH, cos_TR, sin_TR, pool_PADkC, _, old_k_TkC, old_v_TkC = (tensor.clone() for tensor in inputs[:8])
    pool_PADkC[2, :, 1] = torch.stack((old_k_TkC[1], old_v_TkC[1]))
    pool_PADkC[3, :, 0] = torch.stack((old_k_TkC[3], old_v_TkC[3]))
    heads_TXC = (x_TH.double() @ qkv_XH.double().T).view(5, 10, 16)
    turn_T1R = torch.complex(cos_TR, sin_TR).unsqueeze(1)
    turned_TXR = torch.complex(*heads_TXC.chunk(2, dim=-1)) * turn_T1R
    q_TqC, k_TkC = torch.cat((turned_TXR.real, turned_TXR.imag), dim=-1)[:, :8].split((6, 2), dim=1)
    v_TkC = heads_TXC[:, 8:]
    sequences = []
    for rows, new, old in ((slice(0, 3), (0, 1), 2), (slice(3, 5), (3, 4), 3)):
        limits = inputs[-1][rows].tolist()
        for row, limit in zip(range(rows.start, rows.stop), limits, strict=True):
            k_SkC = torch.cat((k_TkC[list(new)][:limit], pool_PADkC[old, 0, :limit]))
            v_SkC = torch.cat((v_TkC[list(new)][:limit], pool_PADkC[old, 1, :limit]))
            sequences.append(Sequence(q_TqC[row : row + 1] * 2, k_SkC, v_SkC, [2 * limit]))
    out_TqC, lse_Tq = one_layer(*inputs)
    assert_equals_softmax((out_TqC - 1, lse_Tq), sequences, 0.25)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_without_a_break_gives_the_same_bits_and_writes_the_pool(backend):
    torch._dynamo.reset()
    expected_inputs, inputs = layer_inputs(), layer_inputs()
    expected = one_layer(*expected_inputs)
    result = torch.compile(one_layer, fullgraph=True, backend=backend)(*inputs)
    for actual_tensor, expected_tensor in zip((*result, *inputs), (*expected, *expected_inputs), strict=True):
        assert torch.equal(actual_tensor, expected_tensor)
    assert not torch.equal(inputs[POOL], layer_inputs()[POOL])


@pytest.mark.parametrize("after_autograd", [False, True], ids=["dynamo", "aot"])
def test_a_compiled_graph_keeps_each_op_as_one_node(after_autograd):
    torch._dynamo.reset()
    calls: list[list[str]] = []

    def record(graph_module, example_inputs):
        nodes = [node for node in graph_module.graph.nodes if node.op == "call_function"]
        # Functionalisation makes a mutating op the first argument of a wrapper.
        named = [str(value) for node in nodes for value in (node.target, *node.args[:1])]
        calls.append([name.removesuffix(".default") for name in named])
        return graph_module.forward

    backend = aot_autograd(fw_compiler=record) if after_autograd else record
    torch.compile(one_layer, fullgraph=True, backend=backend)(*layer_inputs())
    (names,) = calls
    assert [name.removeprefix("longhelix.") for name in names if name.startswith("longhelix.")] == OPS_OF_A_LAYER
    insides = ("softmax", "logsumexp", "index", "linear", "mm", "chunk", "split")
    others = [name for name in names if not name.startswith("longhelix.")]
    assert not [name for name in others if any(word in name for word in insides)]


def test_export_keeps_each_op_as_one_node():
    class Layer(torch.nn.Module):
        def forward(self, *inputs):
            return one_layer(*inputs)

    program = torch.export.export(Layer(), tuple(layer_inputs()))
    targets = [str(node.target) for node in program.graph.nodes]
    assert [name.split(".")[1] for name in targets if name.startswith("longhelix.")] == OPS_OF_A_LAYER
    out, lse = (node.meta["val"] for node in program.graph.find_nodes(op="output")[0].args[0])
    assert (out.shape, lse.shape, lse.dtype) == ((5, 6, 16), (5, 6), torch.float32)


def test_a_limit_beyond_the_blocks_is_refused():
    layer = rows_format(torch.float32, 4, 1, 8).new_layer(4, torch.device("cpu"))
    table = torch.tensor([3, 0, 1, 2]), torch.tensor([[1, 3]])
    with pytest.raises(ValueError, match="a row sees 9 tokens, but its sequence has 2 KV blocks"):
        partial_attention(torch.zeros(1, 1, 8), layer, *table, torch.tensor([0, 1]), torch.tensor([9]), 1.0)


def test_a_row_that_sees_nothing_stays_zero_beside_an_overflowed_value():
    values_PADkC = torch.zeros(1, 2, 4, 1, 8)
    values_PADkC[:, 1] = torch.inf
    layer = KVLayer(rows_format(torch.float32, 4, 1, 8), values_PADkC, None)
    table = torch.tensor([0]), torch.tensor([[0, 1]]), torch.tensor([0, 2]), torch.tensor([0, 4])
    out_TqC, lse_Tq = partial_attention(torch.zeros(2, 1, 8), layer, *table, 1.0)
    assert torch.equal(out_TqC[0], torch.zeros(1, 8))
    assert lse_Tq[0] == -torch.inf
