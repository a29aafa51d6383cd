"""Rows and weights of bytes (w8a8): what becomes of numbers, and products that are the reference's to the bit."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from test_native_attention import seeded
from test_native_linear import inputs, matrix
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
    run_experts,
)
from longhelix.compute.kernels.packed_rows import PackedRows
from longhelix.errors import UserError
from longhelix.spec import Activation

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(native.module is None, reason="this install has no native CPU kernels"),
]

LANES, BLOCK = 16, 64
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

depths = st.one_of(st.sampled_from(range(16, 600, 16)), st.sampled_from([48, 64, 80, 128, 144]))
row_counts = st.one_of(st.integers(1, 13), st.integers(1, 40))
seeds = st.integers(0, 2**31)


def unpacked(weight: Weight, halves: int = 1) -> tuple[Tensor, Tensor]:
    """The bytes (outputs, depth) and the scales (outputs) of a weight, from the description of its panels."""
    width = weight.outputs // halves
    panels = weight.values.view(halves * -(-width // LANES), -1)
    fours = panels[:, : -4 * LANES].view(torch.int8).view(len(panels), -1, LANES, 4)  # [fours of inputs][output][input]
    q_OI = fours.transpose(1, 2).flatten(2).reshape(halves, -1, weight.depth)[:, :width].flatten(0, 1)
    scales_O = panels[:, -4 * LANES :].contiguous().view(torch.float32).view(halves, -1)[:, :width].flatten()
    return q_OI, scales_O


def whole(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of a weight as bytes, one scale each."""
    most_O = weight_OI.float().abs().amax(1)
    inverse_O = torch.where(most_O >= 2.0**-112, torch.full_like(most_O, 127.0) / most_O, 0.0)
    return (weight_OI.float() * inverse_O.unsqueeze(1)).round().to(torch.int8), most_O / 127.0


@given(
    width=st.integers(1, 70),
    depth=depths,
    halves=st.sampled_from([1, 2]),
    source=st.sampled_from(DTYPES),
    cut=st.integers(0, 140),
    seed=seeds,
)
def test_weights_are_bytes_with_a_scale_for_each_output(width, depth, halves, source, cut, seed):
    weight_OI = matrix(halves * width, depth, seed, source)
    weight = make_weight(weight_OI, "w8a8", halves)
    assert (weight.arrangement, weight.has_rows, weight.outputs, weight.depth) == (PANELS, False, halves * width, depth)
    for found, wanted in zip(unpacked(weight, halves), whole(weight_OI), strict=True):
        assert torch.equal(found, wanted)
    in_pieces = PANELS.new_panels(*weight_OI.shape, "w8a8", halves)
    cut = min(cut, len(weight_OI))
    PANELS.write(weight_OI[cut:], cut, in_pieces, halves)
    PANELS.write(weight_OI[:cut], 0, in_pieces, halves)
    assert torch.equal(in_pieces.values, weight.values)


@given(width=st.integers(0, 40), depth=depths, halves=st.sampled_from([1, 2]), count=st.integers(1, 20), seed=seeds)
def test_bytes_of_checkpoints_are_taken_as_they_are(width, depth, halves, count, seed):
    """Also -128, which rounding never makes."""
    rows = PackedRows.empty("int8-channel", halves * width, depth)
    generator = torch.Generator().manual_seed(seed)
    codes_OI = torch.randint(-128, 128, (halves * width, depth), generator=generator, dtype=torch.int8)
    codes_OI[:, ::3] = -128
    rows.code_rows.copy_(codes_OI.view(torch.uint8))
    rows.scales.copy_(torch.rand(halves * width, 1, generator=generator) + 0.01)
    weight = PANELS.of_bytes(rows, halves)
    if width:
        found_OI, scales_O = unpacked(weight, halves)
        assert torch.equal(found_OI, codes_OI)
        assert torch.equal(scales_O, rows.scales.squeeze(1))
    x_TX = torch.randn(count, depth, generator=generator)
    wanted_TO = reference.multiply_bytes(*quantise_rows(x_TX), codes_OI, rows.scales.squeeze(1))
    if halves == 1:
        assert torch.equal(linear(x_TX, weight), wanted_TO)


@given(rows=row_counts, depth=depths, dtype=st.sampled_from(DTYPES), seed=seeds)
@example(rows=5, depth=144, dtype=torch.float32, seed=1)
def test_rows_become_the_bytes_of_the_reference(rows, depth, dtype, seed):
    x_TX = inputs(rows, depth, dtype, seed)
    x_TX[:, ::37] *= 100  # which stand out of their block
    x_TX[0, : depth // 2] = 0
    q_TX, scales_TX = quantise_rows(x_TX)
    wanted = reference.quantise_rows(x_TX)
    assert (q_TX.dtype, scales_TX.shape) == (torch.int8, (rows, -(-depth // BLOCK)))
    assert torch.equal(q_TX, wanted[0])
    assert torch.equal(scales_TX, wanted[1])
    steps_TX = scales_TX.repeat_interleave(BLOCK, dim=1)[:, :depth]
    assert ((q_TX * steps_TX - x_TX.float()).abs() <= steps_TX * 0.50001).all()


def test_ties_are_even_and_what_is_no_number_has_no_scale():
    x_TX = torch.zeros(4, 128)
    x_TX[0, :6] = torch.tensor([127.0, 0.5, 1.5, -2.5, -3.5, 126.5])
    x_TX[1, 66], x_TX[2, 3], x_TX[3, :64] = torch.nan, torch.inf, 2.0**-113
    q_TX, scales_TX = quantise_rows(x_TX)
    assert q_TX[0, :6].tolist() == [127, 0, 2, -2, -4, 126]
    assert scales_TX.isnan().tolist() == [[False, False], [False, True], [True, False], [False, False]]
    assert not q_TX[1:].any()


@given(rows=row_counts, width=st.integers(1, 100), depth=depths, dtype=st.sampled_from(DTYPES), seed=seeds)
@example(rows=13, width=33, depth=144, dtype=torch.bfloat16, seed=1)
def test_products_are_the_reference_to_the_bit(rows, width, depth, dtype, seed):
    generator = seeded(seed)
    x_TX, weight = inputs(rows, depth, dtype, seed + 1), make_weight(matrix(width, depth, seed + 2), "w8a8")
    q_TX, scales_TX = quantise_rows(x_TX)
    bias, residual = torch.randn(width, generator=generator), torch.randn(rows, width, generator=generator)
    product_TO = reference.multiply_bytes(q_TX, scales_TX, *unpacked(weight))
    given_rows = {"dtype": torch.float32, "scales_TX": scales_TX}
    assert torch.equal(linear(q_TX, weight, **given_rows), product_TO)
    assert torch.equal(linear(x_TX, weight, dtype=torch.float32), product_TO)
    around = {"bias": bias, "residual": residual}
    assert torch.equal(linear(q_TX, weight, **around, **given_rows), product_TO + bias + residual)
    narrow = {"bias": bias.to(dtype), "residual": residual.to(dtype)}
    rounded_TO = (product_TO + narrow["bias"].float()).to(dtype) + narrow["residual"]
    assert torch.equal(linear(x_TX, weight, **narrow), rounded_TO)
    assert torch.equal(linear(q_TX, weight, **narrow, dtype=dtype, scales_TX=scales_TX), rounded_TO)
    of_other_dtype = linear(q_TX, weight, bias=narrow["bias"], **given_rows)
    assert torch.equal(of_other_dtype, product_TO + narrow["bias"].float())


@given(rows=row_counts, width=st.integers(1, 60), depth=depths, dtype=st.sampled_from(DTYPES), seed=seeds)
def test_a_norm_and_swiglu_are_as_of_rows_that_are_rounded_before(rows, width, depth, dtype, seed):
    weight = make_weight(matrix(2 * width, depth, seed), "w8a8", halves=2)
    x_TX, norm = inputs(rows, depth, dtype, seed + 1), torch.randn(depth, generator=seeded(seed)).to(dtype)
    q_TX, scales_TX = quantise_rows(x_TX, norm=norm, norm_eps=1e-3)
    found_TO = linear(x_TX, weight, norm=norm, norm_eps=1e-3, activation=Activation())
    assert torch.equal(found_TO, linear(q_TX, weight, activation=Activation(), dtype=dtype, scales_TX=scales_TX))
    gate_Tf, up_Tf = reference.multiply_bytes(q_TX, scales_TX, *unpacked(weight, 2)).to(dtype).chunk(2, dim=1)
    wanted_TO = torch.nn.functional.silu(gate_Tf) * up_Tf
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}[dtype]
    torch.testing.assert_close(found_TO, wanted_TO, rtol=tolerance, atol=tolerance * wanted_TO.abs().max().item())
    # Norms are summed in another order than the reference's, which may change which of two bytes is nearer.
    normed_TX = reference.rms_norm(x_TX, norm, 1e-3).float()
    steps_TX = scales_TX.repeat_interleave(BLOCK, dim=1)[:, :depth]
    assert ((q_TX * steps_TX - normed_TX).abs() <= steps_TX * 0.51 + normed_TX.abs() * 2 * tolerance).all()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bits_do_not_depend_on_the_batch_or_the_threads(threads):
    weight, x_TX = make_weight(matrix(203, 400, 1), "w8a8"), inputs(37, 400, torch.bfloat16, 2)
    one_by_one_TO = torch.cat([linear(x_1X, weight) for x_1X in x_TX.split(1)])
    before = torch.get_num_threads()
    try:
        native.set_num_threads(threads)
        for rows in (2, 3, 4, 7, 8, 12, 13, 37):
            assert torch.equal(linear(x_TX[:rows], weight), one_by_one_TO[:rows])
    finally:
        native.set_num_threads(before)


SUMS = """
import hashlib, torch
from longhelix.compute.kernels import linear, make_weight, quantise_rows
generator, digest = torch.Generator().manual_seed(5), hashlib.sha256()
for rows, width, depth in ((1, 40, 144), (13, 100, 400), (30, 17, 16)):
    weight = make_weight(torch.randn(width, depth, generator=generator), "w8a8")
    x_TX, bias = torch.randn(rows, depth, generator=generator), torch.randn(width, generator=generator)
    x_TX[:, 3] *= 50
    for each in (weight.values, *quantise_rows(x_TX), linear(x_TX, weight, bias=bias)):
        digest.update(each.view(torch.uint8).numpy().tobytes())
print(digest.hexdigest())
"""


@pytest.mark.slow
def test_every_instruction_set_gives_the_same_bits():
    found = {}
    narrower = {"avx512": ["avx2", "portable"], "avx2": ["portable"], "portable": []}
    for name in (own := native.module.instruction_set(), *narrower[own]):
        environment = os.environ | {"LONGHELIX_INSTRUCTION_SET": name}
        ran = subprocess.run(
            [sys.executable, "-c", SUMS], env=environment, capture_output=True, text=True, timeout=120, check=True
        )
        found[name] = ran.stdout
    assert len(set(found.values())) == 1, found


@given(rows=st.integers(1, 30), dtype=st.sampled_from(DTYPES), seed=seeds)
def test_experts_are_their_products_one_by_one(rows, dtype, seed):
    generator, hidden, columns = seeded(seed), 144, (160, 0, 48)
    gate_up = tuple(make_weight(matrix(2 * f, hidden, seed + f), "w8a8", halves=2) for f in columns)
    down = tuple(make_weight(matrix(hidden, f, seed + f + 1), "w8a8") for f in columns)
    experts = Experts.of((0, 1, 2), gate_up, down, 4, torch.device("cpu"))
    assert experts.arrangement is PANELS
    x_TH, norm = inputs(rows, hidden, dtype, seed), torch.randn(hidden, generator=generator).to(dtype)
    experts_TY = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(rows)])
    weights_TY = torch.rand(rows, 2, generator=generator)
    found_TH = run_experts(x_TH.contiguous(), experts, weights_TY, experts_TY, norm=norm, norm_eps=1e-3)
    wanted_TH = torch.zeros(rows, hidden)
    for row in range(rows):
        for weight, expert in zip(weights_TY[row], experts_TY[row].tolist(), strict=True):
            if expert == 3 or not columns[expert]:
                continue
            inner = linear(x_TH[row : row + 1], gate_up[expert], norm=norm, norm_eps=1e-3, activation=Activation())
            wanted_TH[row] += weight * linear(inner, down[expert], dtype=torch.float32)[0]
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    torch.testing.assert_close(found_TH.float(), wanted_TH, rtol=tolerance, atol=1e-6 * wanted_TH.abs().max().item())


def test_no_rows_no_inputs_and_no_outputs():
    weight = make_weight(matrix(5, 32, 1), "w8a8")
    assert linear(torch.zeros(0, 32), weight).shape == (0, 5)
    assert torch.equal(linear(torch.ones(3, 0), make_weight(torch.zeros(20, 0), "w8a8")), torch.zeros(3, 20))
    assert [each.shape for each in quantise_rows(torch.zeros(0, 32))] == [(0, 32), (0, 1)]
    assert linear(torch.zeros(3, 32), make_weight(torch.zeros(0, 32), "w8a8")).shape == (3, 0)


def test_bytes_of_other_rows_or_weights_are_refused():
    q_TX, scales_TX = quantise_rows(torch.ones(3, 32))
    weight, float_weight = make_weight(matrix(5, 32, 1), "w8a8"), make_weight(matrix(5, 32, 1), "int8")
    with pytest.raises(ValueError, match="rows of float32, bfloat16 or float16"):
        linear(q_TX, weight, dtype=torch.float32)
    for rows, other, norm in ((torch.ones(3, 32), weight, None), (q_TX, float_weight, None), (q_TX, weight, scales_TX)):
        with pytest.raises(ValueError, match="scales apply only to int8 rows with a w8a8 weight and no norm"):
            linear(rows, other, norm=norm, dtype=torch.float32, scales_TX=scales_TX)


def test_scales_that_are_not_of_these_rows_are_refused():
    """Which native kernels would read as they are."""
    weight = make_weight(matrix(5, 144, 1), "w8a8")
    q_TX, scales_TX = quantise_rows(inputs(3, 144, torch.float32, 2))
    wanted_TO = linear(q_TX, weight, dtype=torch.float32, scales_TX=scales_TX)
    for rows, scales in (
        (q_TX, scales_TX.double()),
        (q_TX, scales_TX.bfloat16()),
        (q_TX, scales_TX[:2]),
        (q_TX, scales_TX[:, :2]),
        (q_TX, scales_TX.flatten()),
        (q_TX[:2], scales_TX),
        (q_TX[:, :128], scales_TX),
    ):
        arguments = (
            rows,
            weight.values,
            None,
            None,
            0.0,
            "",
            False,
            None,
            torch.float32,
            scales,
            "w8a8",
            5,
            144,
            "panels",
            0,
            False,
        )
        for call in (
            lambda rows=rows, scales=scales: linear(rows, weight, dtype=torch.float32, scales_TX=scales),
            lambda arguments=arguments: torch.ops.longhelix.linear(*arguments),
        ):
            with pytest.raises(ValueError, match=r"scales of torch.float32 and shape \(., 3\)"):
                call()
    apart = torch.cat([scales_TX, scales_TX], dim=1)[:, :3], torch.cat([q_TX, q_TX], dim=1)[:, :144]
    assert torch.equal(linear(apart[1], weight, dtype=torch.float32, scales_TX=apart[0]), wanted_TO)
    plain = Weight(matrix(5, 144, 1), "float32", 5, 144, PLAIN)
    for rows, other in ((q_TX, plain), (q_TX.view(torch.uint8), weight)):
        with pytest.raises(ValueError, match="scales apply only to int8 rows with a w8a8 weight"):
            linear(rows, other, dtype=torch.float32, scales_TX=scales_TX)


def test_products_of_bytes_are_of_the_dtype_of_activations():
    q_TX, scales_TX = quantise_rows(torch.ones(3, 32))
    weight = make_weight(matrix(5, 32, 1), "w8a8")
    for named in ({"scales_TX": scales_TX}, {"scales_TX": scales_TX, "dtype": torch.int8}, {}):
        with pytest.raises(ValueError, match=r"a product cannot have the dtype torch.int8: set dtype"):
            linear(q_TX, weight, **named)


@pytest.mark.parametrize("depth", [1, 8, 40, 120])
def test_rows_of_any_depth_are_rounded(depth):
    """Native kernels take 16 inputs at once, and would go on in the next row."""
    x_TX = torch.ones(3, depth)
    x_TX[1] = 1000
    for found, wanted in zip(quantise_rows(x_TX), reference.quantise_rows(x_TX), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(torch.ops.longhelix.quantise_rows(x_TX, None, 0.0)[1], reference.quantise_rows(x_TX)[1])


def test_a_norm_of_another_dtype():
    """In float32 it is as the reference has it; native products would read others as they read the rows."""
    x_TX, norm = inputs(3, 64, torch.bfloat16, 1), torch.randn(64, generator=seeded(2))
    wanted = reference.quantise_rows(reference.rms_norm(x_TX, norm, 1e-3))
    for found, each in zip(quantise_rows(x_TX, norm=norm, norm_eps=1e-3), wanted, strict=True):
        assert torch.equal(found, each)
    for dtype in ("w8a8", "float32", "int8"):
        with pytest.raises(ValueError, match=r"rows of torch.bfloat16 have a norm of torch.float16"):
            linear(x_TX, make_weight(matrix(5, 64, 3), dtype), norm=norm.half())


def test_a_weight_that_cannot_be_packed_is_refused_in_words(monkeypatch):
    with pytest.raises(UserError) as refused:
        make_weight(torch.zeros(4, 40), "w8a8")
    assert str(refused.value) == (
        "activation_dtype int8 needs the native CPU kernels and weights whose number of inputs is a multiple of 16, "
        "but a weight has 40: leave it out"
    )
    monkeypatch.setattr(native, "module", None)
    with pytest.raises(UserError, match="activation_dtype int8 needs the native CPU kernels"):
        make_weight(torch.zeros(4, 32), "w8a8")


def test_ops_are_whole_in_graphs():
    x_TX, weight = torch.randn(3, 144), make_weight(matrix(20, 144, 1), "w8a8")
    norm = torch.ones(144)
    opcheck(torch.ops.longhelix.quantise_rows.default, (x_TX, norm, 1e-3))
    q_TX, scales_TX = quantise_rows(x_TX)
    arguments = weight.values, None, None, 0.0, "", False, None, torch.float32
    shape = "w8a8", 20, 144, "panels", 0, False
    opcheck(torch.ops.longhelix.linear.default, (q_TX, *arguments, scales_TX, *shape))
    opcheck(torch.ops.longhelix.linear.default, (x_TX, *arguments, None, *shape))
