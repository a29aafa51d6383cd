"""Products with packed weights in Triton: in Triton's interpreter, and on a CUDA device where there is one."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; it comes with torch for CUDA")

from test_experts import NORM_EPS, norm_of, some_taken
from test_native_attention import bits, seeded
from test_triton import CUDA, ROUNDING

from longhelix.compute.kernels import Experts, linear, reference, run_experts
from longhelix.compute.kernels.experts import SWIGLU, addresses
from longhelix.compute.kernels.packed_rows import PackedRows
from longhelix.compute.kernels.triton import experts, multiply_packed, packed_products, weight_tiles
from longhelix.compute.kernels.weight import PACKED, Weight
from longhelix.spec import ACTIVATION_DTYPES, FORMATS, Activation
from random_weights import random_rows
from tiers import few
from triton_interpreter import interpret

pytestmark = pytest.mark.unit

NAMES = [
    "fp8-block", "nvfp4", "int4-g32-zero", "any_k", "q5_1", "iq4_xs", "mxfp4", "mxfp8", "fp8-channel", "int8-channel",
    "q8_0", "q4_1", "q5_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "int4-g64-float16",
    "int4-g128-float16-zero", "int4-g32", "int4-g64", "int4-g128", "int4-g32-float16", "int4-g64-zero",
    "int4-g128-zero", "int4-g32-float16-zero", "int4-g64-float16-zero", "int4-g128-float16",
]  # fmt: skip
DTYPES = [torch.bfloat16, torch.float32, torch.float16]
NUM_EXPERTS = 10
FP8 = ACTIVATION_DTYPES["fp8"]


@pytest.fixture(scope="module", params=["cpu", CUDA])
def device(request):
    """Where the kernels run: on the CPU in the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "cpu":
            interpret(patch)
        yield torch.device(request.param)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed)).to(dtype)


def numbers(rows: PackedRows) -> Tensor:
    return PackedRows(rows.buffer.cpu(), rows.dtype, rows.outputs, rows.depth, rows.lead).numbers().double()


def number_error(name: str, dtype: torch.dtype) -> float:
    """How far a weight's number may be from what it is in a product with rows of `dtype`: integers are rounded if their
    scale blocks are smaller than a tile."""
    codes, numbers = FORMATS[name].codes, FORMATS[name].weight_scales.numbers or math.inf
    rounded = codes.element in ("int8", "uint4", "uint6", "nl4") and numbers < 128 and dtype != torch.float32
    return ROUNDING[dtype] if rounded else 0.0


def test_every_packed_format_is_tested():
    packed = [name for name, format in FORMATS.items() if format.codes is not None]
    assert sorted(NAMES) == sorted(packed)


@pytest.mark.parametrize("dtype", few(DTYPES, 2), ids=str)
@pytest.mark.parametrize(
    ("outputs", "depth", "lead", "rows"),
    few(
        [
            (33, 75, 5, 3),  # an odd lead: tiles begin in the middle of bytes
            (40, 96, 32, 17),
            (20, 1100, 0, 1),  # inputs in splits, the last of them short
            (70, 333, 34, 65),  # past the edges of tiles, and of blocks
            (32, 160, 96, 1),  # loads of 16 bytes
            (5, 7, 120, 2),  # one block's end alone
            (12, 300, 201, 2),  # superblocks of which other ranks have most
            (12, 320, 192, 2),  # loads of 16 bytes behind whole blocks of a superblock
        ],
        2,
    ),
    ids=str,
)
@pytest.mark.parametrize("name", few(NAMES, 10))
def test_products_equal_their_definition(name, outputs, depth, lead, rows, dtype, device):
    weight = random_rows(name, outputs, depth, lead, device=device)
    x_TX, bias = normal(rows, depth, seed=1, dtype=dtype), normal(outputs, seed=2, dtype=dtype)
    out_TO = multiply_packed(x_TX.to(device), weight, torch.float32, bias.to(device)).cpu().double()
    x_TX, weight_OI = x_TX.double(), numbers(weight)
    magnitudes_TO = x_TX.abs() @ weight_OI.abs().T
    error_TO = (number_error(name, dtype) + 2**-20) * magnitudes_TO + 2**-22
    assert ((out_TO - x_TX @ weight_OI.T - bias.double()).abs() <= error_TO).all()


@pytest.mark.parametrize("name", few([name for name in NAMES if FORMATS[name].weight_scales.superblock], 3))
def test_shares_begin_anywhere_in_a_superblock(name, device):
    """Ranks whose inputs begin in the middle of bytes, of blocks and of superblocks add up to all inputs."""
    whole, x_TX = random_rows(name, 12, 700), normal(2, 700, seed=1)
    cuts = 0, 64, 128, 201, 256, 390, 700
    out_TO = torch.zeros(2, 12, dtype=torch.float64)
    for start, stop in pairwise(cuts):
        share = whole.cut(slice(start, stop))
        share = replace(share, buffer=share.buffer.to(device))
        out_TO += multiply_packed(x_TX[:, start:stop].to(device), share, torch.float32).cpu().double()
    weight_OI = whole.numbers().double()
    magnitudes_TO = x_TX.double().abs() @ weight_OI.abs().T
    assert ((out_TO - x_TX.double() @ weight_OI.T).abs() <= 2**-19 * magnitudes_TO).all()


@pytest.mark.parametrize(("outputs", "depth", "splits"), [(20, 1100, True), (20, 200, False)])
def test_results_are_rounded_once(outputs, depth, splits, device):
    weight = random_rows("nvfp4", outputs, depth, device=device)
    x_TX = normal(4, depth, seed=1, dtype=torch.bfloat16).to(device)
    bias = normal(outputs, seed=2).to(device)
    whole = multiply_packed(x_TX, weight, torch.float32, bias)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(bits(multiply_packed(x_TX, weight, dtype, bias).cpu()), bits(whole.to(dtype).cpu()))
    assert (packed_products._splits(depth, 1, packed_products.PACKED_TILES[16])[0] > 1) == splits


def test_rows_of_a_wider_tensor_are_read_where_they_are(device):
    weight, wide_TX = random_rows("fp8-block", 24, 64, device=device), normal(5, 100, seed=3).to(device)
    out_TO = multiply_packed(wide_TX[:, 20:84], weight, torch.float32)
    assert torch.equal(out_TO, multiply_packed(wide_TX[:, 20:84].clone(), weight, torch.float32))
    assert out_TO.abs().sum() > 0


def test_no_rows_no_outputs_and_no_inputs(device):
    bias = normal(8, seed=2).to(device)
    for name in ("fp8-channel", "int4-g32-zero", "nvfp4"):
        for outputs, depth, rows in ((8, 32, 0), (0, 32, 3), (8, 0, 3)):
            weight = random_rows(name, outputs, depth, device=device)
            x_TX = normal(rows, depth, seed=1).to(device)
            out_TO = multiply_packed(x_TX, weight, torch.float32, bias[:outputs])
            assert torch.equal(out_TO, bias[:outputs].expand(rows, outputs))


def test_splits_are_whole_turns_that_have_all_inputs():
    tile = packed_products.PACKED_TILES[16]
    for inputs, tiles in ((0, 1), (1, 1), (1100, 1), (7168, 128), (16384, 40), (7168, 1000)):
        splits, split_inputs = packed_products._splits(inputs, tiles, tile)
        assert split_inputs % tile.inputs == 0
        assert splits * split_inputs >= inputs > (splits - 1) * split_inputs or (inputs, splits) == (0, 1)
        assert splits == 1 or splits * tiles <= packed_products._PROGRAMS


# Inputs in FP8


def outliers(rows: int, depth: int, dtype: torch.dtype) -> Tensor:
    """Rows that are rounded coarsely, each by its own large number."""
    x_TX = normal(rows, depth, seed=1, dtype=dtype)
    x_TX[torch.arange(rows), torch.arange(rows) * 31 % depth] *= torch.arange(1, rows + 1) * 7
    return x_TX


@pytest.mark.parametrize("dtype", few(DTYPES), ids=str)
@pytest.mark.parametrize(
    ("outputs", "depth", "lead", "rows"),
    few(
        [
            (33, 235, 5, 3),
            (70, 333, 34, 65),
            (20, 1100, 0, 1),  # inputs in splits, the last of them short
            (32, 256, 0, 17),  # loads of 16 bytes
            (5, 7, 120, 2),  # one block's end alone
        ],
        2,
    ),
    ids=str,
)
@pytest.mark.parametrize("name", few(FP8, 2))
def test_products_in_fp8_are_those_of_the_reference(name, outputs, depth, lead, rows, dtype, device):
    weight = random_rows(name, outputs, depth, lead if name == "fp8-block" else 0, device=device)
    x_TX, bias = outliers(rows, depth, dtype).to(device), normal(outputs, seed=2, dtype=dtype).to(device)
    out_TO = multiply_packed(x_TX, weight, torch.float32, bias, rounds_inputs=True)
    rounded_TX, weight_OI = reference.round_inputs(x_TX, weight.lead).double().cpu(), numbers(weight)
    assert rounded_TX.shape == x_TX.shape
    magnitudes_TO = rounded_TX.abs() @ weight_OI.abs().T
    error_TO = out_TO.cpu().double() - rounded_TX @ weight_OI.T - bias.cpu().double()
    # Tensor cores of Hopper GPUs add products of FP8 numbers with about 14 bits.
    tolerance = 2**-20 if device.type == "cpu" else 2**-12
    assert (error_TO.abs() <= tolerance * magnitudes_TO + 2**-22).all()
    expected_TO = reference.linear(x_TX, weight, bias, None, 0.0, None, None, torch.float32, rounds_inputs=True)
    assert ((expected_TO - out_TO).cpu().abs() <= 2 * tolerance * magnitudes_TO + 2**-22).all()
    assert not torch.allclose(out_TO, multiply_packed(x_TX, weight, torch.float32, bias), rtol=1e-4)


def test_inputs_are_rounded_to_a_sixteenth():
    """Half the distance of two numbers in e4m3, or of those below 2^-6 of a largest one of 448."""
    x_TX = outliers(40, 300, torch.float32)
    for lead in (0, 100):
        rounded_TX, largest_TX = reference.round_inputs(x_TX, lead), torch.empty_like(x_TX)
        for first in range(-lead, 300, 128):
            block = slice(max(first, 0), first + 128)
            largest_TX[:, block] = x_TX[:, block].abs().amax(1, keepdim=True)
        assert ((rounded_TX - x_TX).abs() <= x_TX.abs() / 16 + largest_TX * 2**-10 / 448).all()
        is_largest_TX = x_TX.abs() == largest_TX
        torch.testing.assert_close(rounded_TX[is_largest_TX], x_TX[is_largest_TX])


@pytest.mark.parametrize("rows", [20, pytest.param(70, marks=pytest.mark.slow)])
def test_how_a_row_is_rounded_does_not_depend_on_other_rows(rows, device):
    weight, x_TX = random_rows("fp8-block", 40, 300, 28, device=device), outliers(rows, 300, torch.bfloat16).to(device)
    out_TO = multiply_packed(x_TX, weight, torch.float32, rounds_inputs=True)
    for row in (0, 19):
        alone_TO = multiply_packed(x_TX[row : row + 1], weight, torch.float32, rounds_inputs=True)
        tolerance = 1e-5 if device.type == "cpu" else 1e-3
        torch.testing.assert_close(alone_TO, out_TO[row : row + 1], rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_zeros_stay_zero_and_what_is_no_number_reaches_no_other_row(device):
    weight, x_TX = random_rows("fp8-block", 24, 300, device=device), normal(6, 300, seed=3, dtype=torch.bfloat16)
    x_TX[0], x_TX[1], x_TX[2, 130], x_TX[3, 7] = 0.0, 1e-38, math.inf, math.nan
    x_TX = x_TX.to(device)
    out_TO = multiply_packed(x_TX, weight, torch.float32, rounds_inputs=True)
    expected_TO = reference.linear(x_TX, weight, None, None, 0.0, None, None, torch.float32, rounds_inputs=True)
    assert not out_TO[:2].any()
    assert out_TO[2:4].isnan().all()
    torch.testing.assert_close(out_TO, expected_TO, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", FP8)
def test_the_op_rounds_the_inputs_of_weights_that_ask_for_it(name, device):
    weight = weight_of(random_rows(name, 48, 130, device=device))
    x_TX, norm = normal(5, 130, seed=6, dtype=torch.bfloat16).to(device), torch.ones(130, dtype=torch.bfloat16)
    around = {"norm": norm.to(device), "activation": SWIGLU}
    rounded_TO = linear(x_TX, replace(weight, rounds_inputs=True), **around)
    expected_TO = reference.linear(
        x_TX, PACKED.rows_of(weight), None, norm.to(device), 0.0, SWIGLU, None, x_TX.dtype, rounds_inputs=True
    )
    torch.testing.assert_close(rounded_TO, expected_TO)
    assert not torch.equal(rounded_TO, linear(x_TX, weight, **around))


# GPUs without e4m3


def test_bits_of_every_number_in_e4m3_become_the_number(device, monkeypatch):
    codes = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0  # NaN, which weights and scales are not
    by_code = PackedRows.empty("fp8-channel", 1, 256)
    by_code.code_rows.copy_(codes)
    by_code.scales.fill_(1.0)
    by_scale = PackedRows.empty("nvfp4", 1, 16 * 128)
    by_scale.code_rows.fill_(2 | 2 << 4)  # ones
    by_scale.scales.copy_(codes[:128].view(torch.float8_e4m3fn))
    by_scale.output_scales.fill_(1.0)
    monkeypatch.setattr(weight_tiles, "has_e4m3", lambda device: False)
    for rows, step in ((by_code, 1), (by_scale, 16)):
        x_TX = torch.eye(rows.depth, device=device)[::step]
        rows = PackedRows(rows.buffer.to(device), rows.dtype, 1, rows.depth)
        out_T1 = multiply_packed(x_TX, rows, torch.float32)
        assert torch.equal(out_T1.flatten().cpu(), codes[: len(out_T1)].view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("name", few(["nvfp4", "fp8-block", "fp8-channel", "mxfp8"]))
def test_products_without_e4m3_are_the_same(name, device, monkeypatch):
    weight, x_TX = random_rows(name, 40, 160, device=device), normal(5, 160, seed=1, dtype=torch.bfloat16).to(device)
    expected_TO = multiply_packed(x_TX, weight, torch.float32)
    monkeypatch.setattr(weight_tiles, "has_e4m3", lambda device: False)
    assert torch.equal(multiply_packed(x_TX, weight, torch.float32), expected_TO)


# Experts


def weight_of(rows: PackedRows) -> Weight:
    return Weight(rows.buffer, rows.dtype, rows.outputs, rows.depth, PACKED, rows.lead)


def in_float64(x_TH, gate_up, down, ids, taken, activation, residual, dtype) -> Tensor:
    norm = norm_of(x_TH.shape[1], dtype).double()
    x_TH = x_TH.double()
    normed_TH = x_TH * torch.rsqrt(x_TH.square().mean(1, keepdim=True) + NORM_EPS) * norm
    out_TH = residual.double().clone()
    for row, (weights_Y, experts_Y) in enumerate(zip(*taken, strict=True)):
        for weight, number in zip(weights_Y.double(), experts_Y.tolist(), strict=True):
            if number in ids:
                at = ids.index(number)
                inner = reference.activate(numbers(gate_up[at]) @ normed_TH[row], activation)
                out_TH[row] += weight * (numbers(down[at]) @ inner)
    return out_TH


@pytest.mark.parametrize("dtype", few(DTYPES, 2), ids=str)
@pytest.mark.parametrize(
    ("columns", "lead", "hidden", "rows", "per_row", "activation"),
    few(
        [
            ({2: 40, 7: 25, 9: 0}, 3, 75, 9, 4, SWIGLU),  # columns that begin in the middle of bytes
            ({0: 32, 3: 64}, 96, 160, 5, 3, SWIGLU),  # loads of 16 bytes
            ({3: 64, 4: 32, 5: 0, 6: 96, 9: 140}, 16, 96, 37, 4, Activation("relu_squared", gated=False)),
            (dict.fromkeys(range(10), 32), 0, 32, 140, 9, Activation("clamped_swiglu")),
        ]
    ),
    ids=str,
)
@pytest.mark.parametrize("name", few(NAMES, 6))
def test_experts_equal_their_definition(name, columns, lead, hidden, rows, per_row, activation, dtype, device):
    ids, sizes, lead = list(columns), list(columns.values()), FORMATS[name].weight_scales.lead(lead)
    gate_up = [
        random_rows(name, activation.projections * size, hidden, seed=at, device=device)
        for at, size in enumerate(sizes)
    ]
    down = [
        random_rows(name, hidden, size, lead if size else 0, seed=50 + at, device=device)
        for at, size in enumerate(sizes)
    ]
    found = addresses(ids, *([weight_of(rows) for rows in side] for side in (gate_up, down)), NUM_EXPERTS)
    x_TH, residual = normal(rows, hidden, seed=6, dtype=dtype), normal(rows, hidden, seed=7, dtype=dtype)
    taken = some_taken(rows, NUM_EXPERTS, per_row, 8)
    rows_e = torch.zeros(len(ids), dtype=torch.int64, device=device)
    out_TH = experts.run_experts(
        x_TH.to(device),
        *found,
        sizes,
        *(part.to(device) for part in taken),
        rows_e,
        activation,
        norm_of(hidden, dtype).to(device),
        NORM_EPS,
        residual.to(device),
        name,
        lead,
    )
    expected_TH = in_float64(x_TH, gate_up, down, ids, taken, activation, residual, dtype)
    # Roundings of the norm, the activations and the sum, and of small groups; of products in float32 a few more.
    tolerance = 4 * ROUNDING[dtype] + 2 * number_error(name, dtype) + 2**-18
    error_TH = (out_TH.cpu().double() - expected_TH).abs()
    assert (error_TH <= tolerance * expected_TH.abs().amax(1, keepdim=True).clamp(min=1)).all()
    counts_E = torch.bincount(taken[1].flatten(), minlength=NUM_EXPERTS)
    assert rows_e.tolist() == [counts_E[number] for number in ids]


@pytest.mark.parametrize("columns", [{2: 0, 3: 32, 8: 144}, {3: 33}], ids=str)
@pytest.mark.parametrize(("name", "rounds_inputs"), [("nvfp4", False), ("fp8-block", True)])
def test_the_op_runs_packed_experts(name, rounds_inputs, columns, device):
    """With addresses as on GPUs, and without, where the reference reads the numbers."""
    ids = tuple(columns)
    gate_up, down = (
        [
            replace(weight_of(rows), rounds_inputs=rounds_inputs)
            for rows in (random_rows(name, *shape(size), device=device) for size in columns.values())
        ]
        for shape in (lambda size: (2 * size, 160), lambda size: (160, size, 8 if size else 0))
    )
    rows_e = torch.zeros(len(ids), dtype=torch.int64, device=device)
    listed = Experts(ids, tuple(gate_up), tuple(down), rows_e)
    found = Experts(ids, tuple(gate_up), tuple(down), rows_e.clone(), addresses(ids, gate_up, down, NUM_EXPERTS))
    x_TH, taken = normal(7, 160, seed=6).to(device), [part.to(device) for part in some_taken(7, NUM_EXPERTS, 4, 8)]
    expected_TH = run_experts(x_TH, listed, *taken)
    assert expected_TH.abs().max() > 0.01
    torch.testing.assert_close(run_experts(x_TH, found, *taken), expected_TH)
    unrounded = (tuple(replace(each, rounds_inputs=False) for each in side) for side in (gate_up, down))
    exact_TH = run_experts(x_TH, Experts(ids, *unrounded, rows_e.clone()), *taken)
    assert torch.allclose(exact_TH, expected_TH, rtol=1e-3) != rounds_inputs
    assert torch.equal(found.rows_e, listed.rows_e)
