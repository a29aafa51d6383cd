"""Routing and experts as ops: native kernels beside the reference, beside products one by one, and by themselves."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from test_native_attention import UNIT, bits, seeded
from test_native_linear import DTYPES, FLOATS, NARROW, Interval, inputs, matrix, name, wide
from torch import Tensor
from torch.library import opcheck

from longhelix.compute.kernels import (
    PANELS,
    PLAIN,
    Experts,
    Weight,
    linear,
    make_weight,
    native,
    quantise_rows,
    reference,
    route,
    run_experts,
)
from longhelix.compute.kernels.experts import SWIGLU, _routing
from longhelix.compute.kernels.library import activation_arguments
from longhelix.compute.models.batch import RowSharding
from longhelix.compute.models.decoder import Decoder
from longhelix.compute.models.experts import _make_experts
from longhelix.compute.models.parameters import declare
from longhelix.compute.models.weights import Weights
from longhelix.compute.parallel.collectives import RankGroup
from longhelix.compute.parallel.mesh import Mesh
from longhelix.errors import UserError
from longhelix.spec import Activation, MoE, Routing, read_hf_config
from longhelix.spec.layout import Layout
from tensors import Tensors, weights_of

pytestmark = pytest.mark.unit
needs_native = pytest.mark.skipif(native.module is None, reason="this install has no native CPU kernels")

NORM_EPS = 1e-3
CPU = torch.device("cpu")


# ----------------------------------------------------------------------------------------------------------------------
# Routing.
# ----------------------------------------------------------------------------------------------------------------------


@st.composite
def routings(draw) -> MoE:
    num_groups = draw(st.integers(1, 4))
    groups_per_token = draw(st.integers(1, num_groups))
    size = draw(st.integers(1, 40))
    shared = draw(st.booleans())
    return MoE(
        num_groups * size,
        draw(st.integers(1, min(groups_per_token * size, 12))),
        8,
        shared_size=8 * shared,
        routing=Routing(
            shared_gate=shared and draw(st.booleans()),
            sigmoid=draw(st.booleans()),
            normalised=draw(st.booleans()),
            num_groups=num_groups,
            groups_per_token=groups_per_token,
            scale=draw(st.sampled_from([1.0, 2.5])),
        ),
    )


def logits_and_bias(moe: MoE, rows: int, seed: int, biased: bool) -> tuple[Tensor, Tensor | None]:
    """Logits of which many are equal, and all others a quarter apart."""
    generator = seeded(seed)
    logits_TX = torch.randint(-12, 13, (rows, moe.num_experts + moe.routing.shared_gate), generator=generator) / 4
    return logits_TX, torch.randint(-2, 3, (moe.num_experts,), generator=generator) * 0.3 if biased else None


@needs_native
@given(moe=routings(), rows=st.integers(0, 40), seed=st.integers(0, 2**31), biased=st.booleans())
def test_native_routing_takes_what_the_reference_takes(moe, rows, seed, biased):
    logits_TX, bias_E = logits_and_bias(moe, rows, seed, biased)
    weights_TY, experts_TY = route(logits_TX, bias_E, moe)
    reference_TY, wanted_TY = reference.route(logits_TX, bias_E, moe)
    assert (weights_TY.dtype, experts_TY.dtype) == (torch.float32, torch.int64)
    clear_T = ~rounding_chooses_groups(logits_TX, bias_E, moe)
    assert torch.equal(experts_TY[clear_T], wanted_TY[clear_T])
    torch.testing.assert_close(weights_TY[clear_T], reference_TY[clear_T], rtol=2e-6, atol=0)


def rounding_chooses_groups(logits_TX: Tensor, bias_E: Tensor | None, moe: MoE) -> Tensor:
    """Rows with two groups of experts whose scores differ, and nearly add up to the same: as those of x and -x."""
    if not moe.routing.sigmoid or moe.num_experts == moe.routing.num_groups:
        return torch.zeros(len(logits_TX), dtype=torch.bool)
    scores_TE = logits_TX[:, : moe.num_experts].double().sigmoid()
    scores_TE = scores_TE if bias_E is None else scores_TE + bias_E
    best_TG2 = scores_TE.unflatten(1, (moe.routing.num_groups, -1)).topk(2, dim=-1).values
    differ_TGG = (best_TG2.unsqueeze(1) - best_TG2.unsqueeze(2)).abs().amax(-1) > 1e-6
    sums_TG = best_TG2.sum(-1)
    near_TGG = (sums_TG.unsqueeze(1) - sums_TG.unsqueeze(2)).abs() < 1e-6
    return (differ_TGG & near_TGG).flatten(1).any(1)


@needs_native
@pytest.mark.parametrize("sigmoid", [False, True])
def test_logits_of_any_size_give_weights_that_are_numbers(sigmoid):
    moe = MoE(20, 3, 8, routing=Routing(sigmoid=sigmoid, normalised=False))
    logits_TE = torch.tensor([[-1e30] * 10 + [1e30] * 10, [-torch.inf] * 19 + [0.0], [0.0] * 20, [-88.0] * 20])
    weights_TY, experts_TY = route(logits_TE, None, moe)
    reference_TY, wanted_TY = reference.route(logits_TE, None, moe)
    assert torch.equal(experts_TY, wanted_TY)
    torch.testing.assert_close(weights_TY, reference_TY, rtol=1e-5, atol=2.0**-120)


@needs_native
def test_rows_without_a_number_take_experts_that_exist():
    """What they then give is no number either; nothing is read that is not there."""
    moe = MoE(20, 3, 8, routing=Routing(sigmoid=True, num_groups=4, groups_per_token=2))
    weights_TY, experts_TY = route(torch.full((6, 20), torch.nan), None, moe)
    assert weights_TY.isnan().all()
    assert experts_TY.min() >= 0
    assert experts_TY.max() < 20
    assert all(len(set(row)) == 3 for row in experts_TY.tolist())


# ----------------------------------------------------------------------------------------------------------------------
# Experts.
# ----------------------------------------------------------------------------------------------------------------------


def make_experts(
    columns: dict[int, int], hidden: int, dtype: torch.dtype, weight_dtype: str, seed: int, sides: int = 2
) -> Experts:
    """An expert of each number, with so many columns; `weight_dtype` "plain" keeps rows of `dtype`."""

    def make(outputs: int, depth: int, seed: int, halves: int) -> Weight:
        weight_OI = matrix(outputs, depth, seed, dtype) if outputs and depth else torch.zeros(outputs, depth)
        if weight_dtype == "plain":
            return Weight(weight_OI.to(dtype), name(dtype), outputs, depth, PLAIN)
        return make_weight(weight_OI, weight_dtype, halves)

    gate_up = [make(sides * width, hidden, seed + id, sides) for id, width in columns.items()]
    down = [make(hidden, width, seed + 100 + id, 1) for id, width in columns.items()]
    return Experts(tuple(columns), tuple(gate_up), tuple(down), torch.zeros(len(columns), dtype=torch.int64))


def some_taken(rows: int, num_experts: int, per_row: int, seed: int) -> tuple[Tensor, Tensor]:
    """Weights and experts as routing gives them: no expert twice in a row, some more often than others."""
    generator = seeded(seed)
    liked_TE = torch.rand(rows, num_experts, generator=generator) * torch.linspace(1, 2, num_experts)
    return torch.rand(rows, per_row, generator=generator) + 0.1, liked_TE.topk(per_row, dim=1).indices


def norm_of(hidden: int, dtype: torch.dtype) -> Tensor:
    return (1 + torch.randn(hidden, generator=seeded(1)) / 3).to(dtype)


def parts_one_by_one(
    x_TH: Tensor, experts: Experts, experts_TY: Tensor, norm: Tensor, activation: Activation = SWIGLU
) -> Tensor:
    """What each expert makes of the rows that take it, by the op of one product: (T, Y, H), float32."""
    parts_TYH = torch.zeros(*experts_TY.shape, x_TH.shape[1])
    for id, gate_up, down in zip(experts.ids, experts.gate_up, experts.down, strict=True):
        rows, choices = (experts_TY == id).nonzero(as_tuple=True)
        if down.depth and len(rows):
            inner = linear(x_TH[rows], gate_up, norm=norm, norm_eps=NORM_EPS, activation=activation)
            parts_TYH[rows, choices] = linear(inner, down, dtype=torch.float32)
    return parts_TYH


def summed(parts_TYH: Tensor, weights_TY: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Interval:
    """Summed in float32 in some order, and rounded; then the residual, and rounded."""
    terms = wide(parts_TYH) * wide(weights_TY)[..., None]
    sums = terms.sum(1)
    out = Interval(sums, sums).widened((terms.shape[1] + 1) * UNIT * abs(terms).sum(1)).rounded(dtype)
    if residual is None:
        return out
    return Interval(out.low + wide(residual), out.high + wide(residual)).rounded(dtype)


COLUMNS = {3: 64, 4: 32, 5: 0, 6: 96, 9: 128}  # of the experts that are here; rows take others as well


@needs_native
@given(
    rows=st.one_of(st.integers(1, 13), st.integers(1, 40), st.just(530)),
    hidden=st.sampled_from([32, 96, 160]),
    dtype=st.sampled_from(DTYPES),
    weight_dtype=st.sampled_from([*FLOATS, *NARROW]),
    per_row=st.integers(1, 6),
    with_residual=st.booleans(),
    with_norm=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_experts_equal_products_one_by_one(rows, hidden, dtype, weight_dtype, per_row, with_residual, with_norm, seed):
    experts = make_experts(COLUMNS, hidden, dtype, weight_dtype, seed % 1000)
    x_TH, norm = inputs(rows, hidden, dtype, seed), norm_of(hidden, dtype) if with_norm else None
    residual = inputs(rows, hidden, dtype, seed + 1) if with_residual else None
    weights_TY, experts_TY = some_taken(rows, 10, per_row, seed + 2)
    out_TH = run_experts(x_TH, experts, weights_TY, experts_TY, norm=norm, norm_eps=NORM_EPS, residual=residual)
    assert out_TH.dtype == dtype
    parts_TYH = parts_one_by_one(x_TH, experts, experts_TY, norm)
    assume(bool(parts_TYH.isfinite().all()))  # float16 may overflow between the products
    summed(parts_TYH, weights_TY, residual, dtype).assert_holds(out_TH)
    counts_E = torch.bincount(experts_TY.flatten(), minlength=10)
    assert experts.rows_e.tolist() == [counts_E[id] for id in experts.ids]
    run_experts(x_TH, experts, weights_TY, experts_TY, norm=norm, norm_eps=NORM_EPS)
    assert experts.rows_e.tolist() == [2 * counts_E[id] for id in experts.ids]


@pytest.mark.parametrize("weight_dtype", ["plain", *(pytest.param(each, marks=needs_native) for each in FLOATS)])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("function", ["gelu", "gelu_tanh", "relu_squared", "clamped_swiglu"])
def test_experts_have_any_activation(function, gated, weight_dtype):
    activation = Activation(function, gated)
    experts = make_experts(COLUMNS, 96, torch.float32, weight_dtype, 51, activation.projections)
    x_TH, norm, (weights_TY, experts_TY) = inputs(30, 96, torch.float32, 52), None, some_taken(30, 10, 3, 53)
    found_TH = run_experts(x_TH, experts, weights_TY, experts_TY, activation=activation)
    parts_TYH = parts_one_by_one(x_TH, experts, experts_TY, norm, activation)
    wanted_TH = (parts_TYH * weights_TY[..., None]).sum(1)
    torch.testing.assert_close(found_TH, wanted_TH, rtol=1e-5, atol=1e-5 * wanted_TH.abs().max().item())
    others_TH = run_experts(x_TH, experts, weights_TY, experts_TY, activation=Activation("silu", gated))
    assert not torch.allclose(found_TH, others_TH, rtol=1e-2)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 5, 530])
def test_rows_of_bytes_are_what_experts_round_rows_to(rows, dtype):
    """The same bits, with a residual and without."""
    experts = make_experts(COLUMNS, 160, dtype, "w8a8", 31)
    x_TH, norm, taken = inputs(rows, 160, dtype, 32), norm_of(160, dtype), some_taken(rows, 10, 3, 33)
    q_TH, scales_TX = quantise_rows(x_TH, norm=norm, norm_eps=NORM_EPS)
    for residual in (None, inputs(rows, 160, dtype, 34)):
        wanted = run_experts(x_TH, experts, *taken, norm=norm, norm_eps=NORM_EPS, residual=residual)
        found = run_experts(q_TH, experts, *taken, residual=residual, dtype=dtype, scales_TX=scales_TX)
        assert found.dtype == dtype
        assert torch.equal(found, wanted)
        assert experts.rows_e.sum() == 0 or rows


@needs_native
def test_scales_that_do_not_fit_rows_of_bytes_are_refused():
    x_TH, taken = inputs(5, 160, torch.float32, 35), some_taken(5, 10, 3, 36)
    q_TH, scales_TX = quantise_rows(x_TH)
    in_bytes, wide = (
        make_experts(COLUMNS, 160, torch.float32, "w8a8", 37),
        make_experts(COLUMNS, 160, torch.float32, "int8", 37),
    )
    for experts, rows, scales, norm, words in (
        (wide, q_TH, scales_TX, None, "scales apply only to int8 rows"),
        (in_bytes, x_TH, scales_TX, None, "scales apply only to int8 rows"),
        (in_bytes, q_TH, scales_TX, norm_of(160, torch.float32), "scales apply only to int8 rows"),
        (in_bytes, q_TH, scales_TX[:4], None, "scales of torch.float32 and shape"),
        (in_bytes, q_TH[:, :128], scales_TX, None, "the weight takes rows of 160 bytes"),
    ):
        with pytest.raises(ValueError, match=words):
            run_experts(rows, experts, *taken, norm=norm, dtype=torch.float32, scales_TX=scales)


def held_in_panels() -> Experts:
    return make_experts(COLUMNS, 32, torch.float32, "float32", 41)


def held_by_number() -> Experts:
    panels = held_in_panels()
    return Experts.of(panels.ids, panels.gate_up, panels.down, 10, CPU)


def held_as_rows() -> Experts:
    return make_experts(COLUMNS, 32, torch.float32, "plain", 41)


def none_held() -> Experts:
    return make_experts({}, 32, torch.float32, "plain", 41)


HELD = [held_as_rows, none_held, *(pytest.param(made, marks=needs_native) for made in (held_in_panels, held_by_number))]
ROWS_32, TAKEN_5 = torch.ones(5, 32), (torch.ones(5, 2), torch.zeros(5, 2, dtype=torch.int64))


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("as_op", [False, True])
@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("rows of torch.float32 have a norm of torch.bfloat16", {"norm": torch.ones(32).bfloat16()}),
        (
            "rows of torch.bfloat16 have a norm of torch.float16",
            {"x": ROWS_32.bfloat16(), "norm": torch.ones(32).half()},
        ),
        ("rows of 32 inputs have a norm of shape", {"norm": torch.ones(16)}),
        ("has a residual of shape", {"residual": torch.ones(3, 32)}),
        ("has a residual of shape", {"residual": torch.ones(5, 16)}),
        ("weights have the dtype torch.float64", {"taken": (TAKEN_5[0].double(), TAKEN_5[1])}),
        ("weights have the dtype torch.bfloat16", {"taken": (TAKEN_5[0].bfloat16(), TAKEN_5[1])}),
        ("expert ids torch.int32", {"taken": (TAKEN_5[0], TAKEN_5[1].int())}),
        ("for 5 rows, expert weights have the shape", {"taken": (TAKEN_5[0][:3], TAKEN_5[1][:3])}),
        ("for 5 rows, expert weights have the shape", {"taken": (TAKEN_5[0][:, :1], TAKEN_5[1])}),
        ("for 5 rows, expert weights have the shape", {"taken": (TAKEN_5[0].flatten(), TAKEN_5[1].flatten())}),
        ("give them two dimensions", {"x": ROWS_32[0]}),
        ("int8 have no scales|int8 rows with scales", {"x": ROWS_32.to(torch.int8), "dtype": torch.float32}),
        ("a product cannot have the dtype torch.int8: set dtype", {"x": ROWS_32.to(torch.int8)}),
        ("a product cannot have the dtype torch.bool: set dtype|of another dtype", {"dtype": torch.bool}),
        ("a product cannot have the dtype torch.float64: set dtype", {"x": ROWS_32.double()}),
        ("scales apply only to int8 rows|int8 rows with scales", {"scales_TX": torch.ones(5, 1)}),
        (
            "scales of torch.float32 and shape|scales apply only to int8 rows|int8 rows with scales",
            {"x": ROWS_32.to(torch.int8), "dtype": torch.float32, "scales_TX": torch.ones(3, 1)},
        ),
    ],
)
def test_what_experts_would_read_as_something_else_is_refused(words, changed, as_op, held, monkeypatch):
    """In whatever form, in graphs, and on a rank that has no expert as on the others."""
    x_TH, taken = changed.get("x", ROWS_32), changed.get("taken", TAKEN_5)
    around = {name: each for name, each in changed.items() if name not in ("x", "taken")}
    if as_op:
        monkeypatch.setattr("longhelix.compute.kernels.experts.is_compiling", lambda: True)
    with pytest.raises(ValueError, match=words):
        run_experts(x_TH, held(), *taken, **around)


@pytest.mark.parametrize("held", [each for each in HELD if each is not none_held])
@pytest.mark.parametrize("width", [16, 64])
def test_rows_of_another_width_than_the_experts_are_refused(width, held, monkeypatch):
    for as_op in (False, True):
        monkeypatch.setattr("longhelix.compute.kernels.experts.is_compiling", lambda as_op=as_op: as_op)
        with pytest.raises(ValueError, match=f"rows have {width} inputs, but the weight takes 32"):
            run_experts(torch.ones(5, width), held(), *TAKEN_5)


@needs_native
def test_bytes_are_refused_alike_by_a_rank_without_experts():
    x_TH, norm = inputs(5, 160, torch.float32, 35), norm_of(160, torch.float32)
    q_TH, scales_TX = quantise_rows(x_TH)
    for rows, scales, around, words in (
        (q_TH, scales_TX[:4], {}, "scales of torch.float32 and shape"),
        (q_TH, scales_TX.double(), {}, "scales of torch.float32 and shape"),
        (q_TH, scales_TX, {"norm": norm}, "scales apply only to int8 rows"),
        (x_TH, scales_TX, {}, "scales apply only to int8 rows"),
        (q_TH, None, {}, "rows of torch.int8 have no scales"),
    ):
        for columns in (COLUMNS, {}):
            experts = make_experts(columns, 160, torch.float32, "w8a8", 37)
            with pytest.raises(ValueError, match=words):
                run_experts(rows, experts, *TAKEN_5, dtype=torch.float32, scales_TX=scales, **around)


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_residual_of_another_dtype_is_added_as_one_of_the_results(held, dtype):
    x_TH, taken = inputs(5, 32, torch.float32, 42), some_taken(5, 10, 3, 43)
    residual = inputs(5, 32, torch.float32, 44).to(dtype)
    found = run_experts(x_TH, held(), *taken, residual=residual)
    wanted = run_experts(x_TH, held(), *taken, residual=residual.float())
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted)


@needs_native
def test_a_residual_of_another_dtype_is_added_to_experts_of_bytes():
    experts = make_experts(COLUMNS, 160, torch.float32, "w8a8", 37)
    q_TH, scales_TX = quantise_rows(inputs(5, 160, torch.float32, 35))
    residual, taken = inputs(5, 160, torch.bfloat16, 36), some_taken(5, 10, 3, 33)
    around = {"dtype": torch.float32, "scales_TX": scales_TX}
    found = run_experts(q_TH, experts, *taken, **around, residual=residual)
    assert torch.equal(found, run_experts(q_TH, experts, *taken, **around, residual=residual.float()))


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("number", [-1, -2, 10, -(10**10), 10**10])
def test_numbers_that_no_expert_has_take_none(number, held):
    x_TH, (weights_TY, experts_TY) = inputs(5, 32, torch.float32, 42), some_taken(5, 10, 3, 43)
    experts, fewer = held(), held()
    out_TH = run_experts(x_TH, experts, weights_TY, experts_TY.index_fill(1, torch.tensor([1]), number))
    kept = torch.tensor([0, 2])
    wanted_TH = run_experts(x_TH, fewer, weights_TY[:, kept], experts_TY[:, kept])
    assert torch.equal(out_TH, wanted_TH)
    assert torch.equal(experts.rows_e, fewer.rows_e)
    nobody_TH = run_experts(x_TH, experts, weights_TY, torch.full_like(experts_TY, number), residual=x_TH)
    assert torch.equal(nobody_TH, x_TH)
    assert torch.equal(experts.rows_e, fewer.rows_e)


@needs_native
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_experts_equal_the_reference(dtype, tolerance):
    """Relative to the largest number of a row; the reference rounds each expert's output to the dtype of x."""
    packed = make_experts(COLUMNS, 96, dtype, name(dtype), 5)
    plain = make_experts(COLUMNS, 96, dtype, "plain", 5)
    x_TH, residual = inputs(70, 96, dtype, 6), inputs(70, 96, dtype, 7)
    taken = some_taken(70, 10, 4, 8)
    norm = {"norm": norm_of(96, dtype), "norm_eps": NORM_EPS}
    for added in (None, residual):
        native_TH = run_experts(x_TH, packed, *taken, **norm, residual=added).float()
        reference_TH = run_experts(x_TH, plain, *taken, **norm, residual=added).float()
        largest_T1 = reference_TH.abs().amax(1, keepdim=True)
        assert bool(((native_TH - reference_TH).abs() <= tolerance * largest_T1).all())
    assert torch.equal(packed.rows_e, plain.rows_e)
    assert plain.rows_e.sum() > 0


@pytest.fixture
def threads():
    """native.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield native.set_num_threads
    native.set_num_threads(before)


@needs_native
@pytest.mark.parametrize("weight_dtype", [*FLOATS, *NARROW])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_do_not_depend_on_its_batch_or_on_threads(dtype, weight_dtype, threads):
    """Alone, among others that take the same experts or other ones, and beyond the rows that are taken at once."""
    experts = make_experts(COLUMNS, 96, dtype, weight_dtype, 9)
    x_TH, norm = inputs(530, 96, dtype, 10), norm_of(96, dtype)
    weights_TY, experts_TY = some_taken(530, 10, 4, 11)

    def run(rows: slice) -> Tensor:
        part = x_TH[rows], experts, weights_TY[rows], experts_TY[rows]
        return bits(run_experts(*part, norm=norm, norm_eps=NORM_EPS, residual=x_TH[rows]))

    threads(1)
    whole_TH = run(slice(0, 530))
    for count in (1, 2, 3):
        threads(count)
        for first, last in [(0, 530), (3, 40), (500, 530), *((5, 5 + r) for r in range(1, 17)), (529, 530)]:
            assert torch.equal(run(slice(first, last)), whole_TH[first:last]), (count, first, last)


@needs_native
def test_no_rows_no_experts_and_no_columns():
    norm = {"norm": norm_of(32, torch.float32), "norm_eps": NORM_EPS}
    x_TH, taken = inputs(5, 32, torch.float32, 12), some_taken(5, 10, 2, 13)
    experts = make_experts(COLUMNS, 32, torch.float32, "float32", 14)
    nobody = torch.zeros(0, 2), torch.zeros(0, 2, dtype=torch.int64)
    assert run_experts(torch.zeros(0, 32), experts, *nobody, **norm).shape == (0, 32)
    for columns in ({}, dict.fromkeys(range(10), 0)):
        empty = make_experts(columns, 32, torch.float32, "float32", 14)
        assert torch.equal(run_experts(x_TH, empty, *taken, **norm), torch.zeros(5, 32))
        assert torch.equal(run_experts(x_TH, empty, *taken, **norm, residual=x_TH), x_TH)
        assert empty.rows_e.sum() == (20 if columns else 0)


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_without_columns_nothing_is_written_beside_rows_that_cannot_be_packed(rows):
    tensors = {"a.gate_up": torch.zeros(0, 136), "a.down": torch.zeros(136, 0)}
    empty = _make_experts(weights_of(tensors, "float32"), {0: "a."}, 1, CPU, 2)
    assert empty.arrangement is PLAIN
    x_TH, taken = inputs(rows, 136, torch.float32, 12), some_taken(rows, 1, 1, 13)
    out_TH = run_experts(x_TH, empty, *taken, norm=norm_of(136, torch.float32), norm_eps=NORM_EPS)
    assert torch.equal(out_TH, torch.zeros(rows, 136))


def test_experts_of_which_one_cannot_be_packed_are_all_kept_as_rows():
    def weights(columns: int) -> dict[str, Tensor]:
        shapes = {"gate_up": (2 * columns, 32), "down": (32, columns)}
        return {f"{stem}{part}": torch.zeros(shape) for stem in ("a.", "b.") for part, shape in shapes.items()}

    stems = {0: "a.", 1: "b."}
    mixed = weights(32) | {name: weight for name, weight in weights(24).items() if name.startswith("b.")}
    given = weights_of(mixed, "float32")
    kept = _make_experts(given, stems, 2, CPU, 2)
    assert not given.unused
    assert kept.arrangement is PLAIN
    assert all(weight.arrangement is PLAIN for weight in (*kept.gate_up, *kept.down))
    assert _make_experts(weights_of(weights(0), "float32"), stems, 2, CPU, 2).rows_e.tolist() == [0, 0]
    with pytest.raises(UserError, match=r"weight_dtype int8 needs .* but a weight has 24"):
        _make_experts(weights_of(weights(24), "int8"), stems, 2, CPU, 2)
    if native.module is not None:
        assert _make_experts(weights_of(weights(32), "int8"), stems, 2, CPU, 2).arrangement is PANELS


def test_a_decoder_counts_rows_by_layer_and_forgets_them():
    """Shared experts are not counted, and layers without experts have no counts."""
    config = {
        "model_type": "deepseek_v3", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "vocab_size": 16, "max_position_embeddings": 64, "rms_norm_eps": NORM_EPS,
        "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
        "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    }  # fmt: skip
    spec = read_hf_config(config)
    parameters = declare(spec, Layout(), 0)
    ones = {source.name: torch.ones(source.shape) for parameter in parameters for source in parameter.sources}
    weights = Weights(Tensors(ones), parameters, torch.float32, "float32", torch.device("cpu"))
    group = RankGroup((0,), 0, None)
    decoder = Decoder(spec, Mesh(Layout(), 0, group, group, group), weights)
    assert decoder.expert_rows() == [[], [0] * 6]
    decoder.layers[1].ffn(inputs(5, 32, torch.float32, 22), SimpleNamespace(padding_T=None, sharding=RowSharding()))
    assert decoder.expert_rows() == [[], [5, 5, 0, 0, 0, 0]]  # all scores are equal
    decoder.forget_expert_rows()
    assert decoder.expert_rows() == [[], [0] * 6]


# ----------------------------------------------------------------------------------------------------------------------
# Registration.
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [5, 0])
@pytest.mark.parametrize(
    "moe", [MoE(8, 3, 8), MoE(8, 2, 8, shared_size=8, routing=Routing(shared_gate=True, sigmoid=True))]
)
def test_torch_accepts_routing_and_its_fake(moe, rows):
    logits_TX, bias_E = logits_and_bias(moe, rows, 15, biased=True)
    results = opcheck(torch.ops.longhelix.route.default, (logits_TX, bias_E, *_routing(moe)))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    "weight_dtype", ["plain", *(pytest.param(dtype, marks=needs_native) for dtype in ("bfloat16", "int4"))]
)
@pytest.mark.parametrize("rows", [5, 0])
def test_torch_accepts_experts_and_their_fake(rows, weight_dtype):
    experts = make_experts(COLUMNS, 32, torch.float32, weight_dtype, 16)
    x_TH, taken = torch.randn(rows, 32, generator=seeded(17)), some_taken(rows, 10, 2, 18)
    call = (
        x_TH,
        [w.values for w in experts.gate_up],
        [w.values for w in experts.down],
        [],
        *taken,
        *activation_arguments(SWIGLU),
        norm_of(32, x_TH.dtype),
    )
    for residual in (None, x_TH.clone()):
        counts = NORM_EPS, residual, x_TH.dtype, None, experts.rows_e, experts.ids, list(COLUMNS.values()), 0
        arguments = *call, *counts, experts.hidden, experts.weight_dtype, experts.arrangement.name, False
        results = opcheck(torch.ops.longhelix.run_experts.default, arguments)
        assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("packed", "numbered"),
    [(False, False), pytest.param(True, False, marks=needs_native), pytest.param(True, True, marks=needs_native)],
)
def test_compiled_without_a_break_is_the_same_bits_and_counts(packed, numbered):
    torch._dynamo.reset()
    experts = make_experts(COLUMNS, 32, torch.float32, "float32" if packed else "plain", 19)
    if numbered:  # as models have them, and a graph no list of their weights
        experts = Experts.of(experts.ids, experts.gate_up, experts.down, 10, torch.device("cpu"))
        assert experts.addresses
    moe, x_TH, norm = MoE(10, 2, 8), inputs(6, 32, torch.float32, 20), norm_of(32, torch.float32)

    def layer(logits_TX: Tensor, held: Experts) -> Tensor:
        return run_experts(x_TH, held, *route(logits_TX, None, moe), norm=norm, norm_eps=NORM_EPS) + 1

    logits_TX, counted = logits_and_bias(moe, 6, 21, biased=False)[0], replace(experts, rows_e=experts.rows_e.clone())
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(logits_TX, counted), layer(logits_TX, experts))
    assert torch.equal(counted.rows_e, experts.rows_e)
    assert experts.rows_e.sum() > 0
