"""Products with packed weights equal float64 products with the numbers that their codes stand for."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear as multiply
from torch.nn.functional import silu

from longhelix.compute.kernels import PANELS, Experts, linear, native, reference, run_experts
from longhelix.compute.kernels.packed_rows import PackedRows, encoded, joined, ordered, unpacked
from longhelix.compute.kernels.weight import PACKED, PLAIN
from longhelix.spec import FORMATS, Activation
from longhelix.spec.gguf_quantisation import GGUF_FORMATS
from longhelix.spec.packed_share import packed_share

pytestmark = pytest.mark.unit

NAMES = [name for name, format in FORMATS.items() if format.codes is not None]
GGUF = {*GGUF_FORMATS.values(), "any_k"} - {"int4-g32-float16", "mxfp4"}  # nothing is quantised to these here
ARRANGEMENTS = [PACKED] if native.module is None else [PACKED, PANELS]
CPU = torch.device("cpu")
SWIGLU = Activation()
# Rows of activations become exact sums of bfloat16 numbers, so only float32 sums are rounded.
TOLERANCE = 5e-6


def random_rows(name: str, outputs: int, depth: int, lead: int = 0, seed: int = 0) -> PackedRows:
    """Random codes, and scales that differ from block to block and from output to output."""
    generator = torch.Generator().manual_seed(seed)
    rows = PackedRows.empty(name, outputs, depth, FORMATS[name].weight_scales.lead(lead), CPU)
    codes = torch.randint(256, rows.code_rows.shape, generator=generator, dtype=torch.uint8)
    if rows.codes.element == "e4m3":
        codes = torch.where(codes & 127 == 127, 0, codes)  # NaN
    rows.code_rows.copy_(codes)
    sides = (rows.scales, rows.offsets, rows.superblock_scales, rows.superblock_offsets)
    for numbers in (each for each in sides if each is not None):
        if numbers.dtype == torch.int8:
            numbers.copy_(torch.randint(-64, 64, numbers.shape, generator=generator))
        else:
            numbers.copy_(torch.rand(numbers.shape, generator=generator) + 0.01)
    if rows.zeros is not None:
        rows.zeros.copy_(torch.randint(16, rows.zeros.shape, generator=generator))
    if rows.output_scales is not None:
        rows.output_scales.copy_(torch.rand(outputs, generator=generator) + 0.5)
    return rows


def sizes(rows: PackedRows) -> torch.Tensor:
    """The size of each number's parts, which kernels add up apart. float64."""
    size_OI = rows.numbers().double().abs()
    if rows.offsets is not None:
        without = PackedRows(rows.buffer.clone(), rows.dtype, rows.outputs, rows.depth, rows.lead)
        without.offsets.zero_()
        offsets_OI = rows.numbers().double() - without.numbers().double()
        size_OI = without.numbers().double().abs() + offsets_OI.abs()
    return size_OI


def arranged(arrangement, rows: PackedRows, halves: int = 1):
    return arrangement.of_rows(rows, halves)


def assert_near(found, wanted, size):
    assert found.shape == wanted.shape
    assert ((found.double() - wanted).abs() <= TOLERANCE * size).all()


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=lambda each: each.name)
@pytest.mark.parametrize("name", ["int4-g32", "int4-g64-zero", "int4-g128-float16-zero"])
def test_ordered_inputs_are_taken_from_where_they_are(arrangement, name):
    """Also a part of them, which is padded, and columns of a wider tensor."""
    numbers, generator = FORMATS[name].weight_scales.numbers, torch.Generator().manual_seed(1)
    rows = random_rows(name, 21, 304)
    group_I = (torch.arange(304) // numbers)[torch.randperm(304, generator=generator)]
    for inputs in (range(304), range(40, 171), range(3), range(303, 304)):
        share = packed_share(name, True, 304, inputs)
        cut = slice(inputs.start, inputs.stop)
        part = ordered(rows, group_I, cut, share.format, share.depth)
        codes_OI, zeros_OI, scales_OI = (each[:, cut].double() for each in _apart(rows, group_I))
        wanted_OI = (codes_OI - zeros_OI) * scales_OI
        assert torch.equal(part.numbers().double(), wanted_OI)
        weight = arranged(arrangement, part)
        for count in (0, 1, 3, 40):
            x_TX = torch.randn(count, 400, generator=generator)[:, : len(inputs)]
            # Kernels sum codes and zero points apart.
            size = multiply(x_TX.double().abs(), (codes_OI + zeros_OI) * scales_OI)
            assert_near(linear(x_TX, weight), multiply(x_TX.double(), wanted_OI), size)
        with pytest.raises(ValueError, match=f"takes rows and norms of {len(inputs)} numbers"):
            linear(torch.zeros(1, len(inputs) + 1), weight)


def _apart(rows: PackedRows, group_I: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, zero points and scales of all inputs, whose groups are `group_I`."""
    codes_OI = unpacked(rows.code_rows)[:, : rows.depth]
    zeros_OI = torch.full_like(codes_OI, 8) if rows.zeros is None else rows.zeros[:, group_I]
    return codes_OI, zeros_OI, rows.scales[:, group_I]


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=lambda each: each.name)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_equal_float64(arrangement, name, dtype):
    generator = torch.Generator().manual_seed(1)
    for outputs, depth, lead in ((40, 256, 0), (17, 208, 16), (3, 48, 96), (1, 16, 0)):
        rows = random_rows(name, outputs, depth, lead)
        weight, numbers_OI = arranged(arrangement, rows), rows.numbers().double()
        assert arrangement.holds((outputs, depth), name, CPU, rows.lead)
        for count in (0, 1, 2, 3, 5, 13, 70):
            x_TX = torch.randn(count, depth, generator=generator).to(dtype)
            size = multiply(x_TX.double().abs(), sizes(rows))
            assert_near(linear(x_TX, weight, dtype=torch.float32), multiply(x_TX.double(), numbers_OI), size)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=lambda each: each.name)
@pytest.mark.parametrize("name", NAMES)
def test_norm_bias_gate_and_residual(arrangement, name):
    generator = torch.Generator().manual_seed(2)
    rows = random_rows(name, 38, 160, 32)
    weight, numbers_OI = arranged(arrangement, rows, halves=2), rows.numbers().double()
    x_TX, norm = torch.randn(7, 160, generator=generator), torch.rand(160, generator=generator)
    bias, residual = torch.randn(38, generator=generator), torch.randn(7, 19, generator=generator)
    options = {"bias": bias, "norm": norm, "norm_eps": 1e-3, "activation": SWIGLU, "residual": residual}
    normed = x_TX.double() * (x_TX.double().square().mean(1, keepdim=True) + 1e-3).rsqrt() * norm
    gate, up = (multiply(normed, numbers_OI) + bias).chunk(2, dim=1)
    size_gate, size_up = (multiply(normed.abs(), sizes(rows)) + bias.abs()).chunk(2, dim=1)
    found = linear(x_TX, weight, **options)
    assert_near(found, silu(gate) * up + residual, 4 * size_gate * size_up + residual.abs())


@pytest.mark.parametrize("name", NAMES)
def test_pieces_and_halves_fill_panels_as_whole_weights_do(name):
    if native.module is None:
        pytest.skip("this install has no native CPU kernels")
    rows = random_rows(name, 58, 144, 48)
    for halves in (1, 2):
        whole, pieces = PANELS.of_rows(rows, halves), PANELS.new_panels(58, 144, name, halves, rows.lead)
        for first, stop in ((0, 5), (5, 31), (31, 58)):
            PANELS.write_packed(rows.selected(torch.arange(first, stop)), first, pieces, halves)
        assert torch.equal(whole.values, pieces.values)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=lambda each: each.name)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_equal_float64(arrangement, name, dtype):
    generator, hidden, columns = torch.Generator().manual_seed(3), 96, (80, 0, 48)
    gate_up = [random_rows(name, 2 * f, hidden, seed=f) for f in columns]
    down = [random_rows(name, hidden, f, 16, seed=f + 1) for f in columns]
    for rows in (*gate_up, *down):  # so that outputs neither vanish nor overflow
        for numbers in (rows.superblock_scales, rows.superblock_offsets):
            if numbers is not None:
                numbers.copy_(numbers / 512)
        if rows.superblock_scales is None:
            rows.scales.copy_(rows.scales.float() / 64)
            if rows.offsets is not None:
                rows.offsets.copy_(rows.offsets / 64)
    experts = Experts.of(
        (0, 1, 2),
        tuple(arranged(arrangement, rows, 2) for rows in gate_up),
        tuple(arranged(arrangement, rows) for rows in down),
        4,
        CPU,
    )
    for count in (1, 9):
        x_TH = torch.randn(count, hidden, generator=generator).to(dtype)
        experts_TY = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(count)])
        weights_TY = torch.rand(count, 2, generator=generator)
        wanted, size = torch.zeros(2, count, hidden, dtype=torch.float64)
        for row in range(count):
            for weight, expert in zip(weights_TY[row], experts_TY[row].tolist(), strict=True):
                if expert == 3:
                    continue
                gate, up = multiply(x_TH[row].double(), gate_up[expert].numbers().double()).chunk(2)
                inner = silu(gate) * up
                wanted[row] += weight * multiply(inner, down[expert].numbers().double())
                size[row] += weight * multiply(inner.abs(), sizes(down[expert]))
        if arrangement is PANELS:  # which also give results wider than their inputs
            wide = run_experts(x_TH, experts, weights_TY, experts_TY, dtype=torch.float32)
            assert ((wide.double() - wanted).abs().max() / size.max().clamp(min=1e-9)) <= 2e-2
        found = run_experts(x_TH, experts, weights_TY, experts_TY)
        error = (found.double() - wanted).abs().max() / size.max().clamp(min=1e-9)
        assert error <= (1e-5 if dtype == torch.float32 else 2e-2)


NUMBERS = [PLAIN] if native.module is None else [PLAIN, PANELS]


@pytest.mark.parametrize("arrangement", NUMBERS, ids=lambda each: each.name)
@pytest.mark.parametrize("name", ["float16", "float32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_numbers_that_rows_cannot_hold_are_not_rounded(arrangement, name, dtype):
    """Also numbers of float16 that are subnormal. Rows look like that in bfloat16 beside F16 weights of GGUF files."""
    generator = torch.Generator().manual_seed(4)
    for outputs, depth in ((40, 256), (17, 208), (1, 16)):
        weight_OI = torch.randn(outputs, depth, generator=generator).to(getattr(torch, name))
        weight_OI[0] *= 2.0**-20
        weight = arrangement.new_weight(weight_OI, name, 1)
        rows_t = torch.tensor([outputs - 1, 0])
        assert torch.equal(weight.rows(rows_t), weight_OI[rows_t])
        for count in (0, 1, 3, 13, 70):
            x_TX = torch.randn(count, depth, generator=generator).to(dtype)
            size = multiply(x_TX.double().abs(), weight_OI.double().abs())
            assert_near(linear(x_TX, weight, dtype=torch.float32), multiply(x_TX.double(), weight_OI.double()), size)


@pytest.mark.parametrize("arrangement", NUMBERS, ids=lambda each: each.name)
@pytest.mark.parametrize("name", ["float16", "float32"])
def test_experts_multiply_numbers_that_their_rows_cannot_hold(arrangement, name):
    generator = torch.Generator().manual_seed(5)
    gate_up_OI, down_OI = (
        torch.randn(*shape, generator=generator).to(getattr(torch, name)) / 8 for shape in ((96, 96), (96, 48))
    )
    gate_up, down = arrangement.new_weight(gate_up_OI, name, 2), arrangement.new_weight(down_OI, name, 1)
    experts = Experts.of((0,), (gate_up,), (down,), 1, CPU)
    x_TH = torch.randn(9, 96, generator=generator).bfloat16()
    taken = torch.ones(9, 1), torch.zeros(9, 1, dtype=torch.int64)
    bias = torch.randn(96, generator=generator).bfloat16()
    gate, up = multiply(x_TH.double(), gate_up_OI.double()).chunk(2, dim=1)
    wanted = multiply(silu(gate) * up, down_OI.double())
    found = run_experts(x_TH, experts, *taken)
    assert found.dtype == torch.bfloat16
    assert (found.double() - wanted).abs().max() <= 2.0**-7 * wanted.abs().max()
    # The same with a bias, which a product of rows in bfloat16 has in bfloat16.
    gate, up = (torch.cat((gate, up), dim=1) + bias).chunk(2, dim=1)
    inner = linear(x_TH, gate_up, bias=bias, activation=SWIGLU)
    assert (inner.double() - silu(gate) * up).abs().max() <= 2.0**-7 * (silu(gate) * up).abs().max()


@pytest.mark.parametrize("name", NAMES)
def test_joined_and_selected_rows(name):
    rows = random_rows(name, 9, 50, 7)
    parts = [rows.selected(torch.arange(first, stop)) for first, stop in ((0, 4), (4, 5), (5, 9))]
    assert torch.equal(joined(parts).numbers(), rows.numbers())
    order = torch.tensor([8, 2, 2, 0])
    assert torch.equal(rows.selected(order).numbers(), rows.numbers()[order])
    assert torch.equal(rows.numbers(slice(3, 6)), rows.numbers()[3:6])


@pytest.mark.parametrize("name", NAMES)
def test_rows_take_the_bytes_of_the_formula(name):
    format = FORMATS[name]
    for depth, lead in ((256, 0), (33, 5), (1, 0)):
        rows = PackedRows.empty(name, 11, depth, lead if format.weight_scales.numbers else 0, CPU)
        assert sum(rows.row_bytes) == format.weight_row_bytes(depth, rows.lead)
        assert 0 <= len(rows.buffer) - 11 * sum(rows.row_bytes) < len(rows.row_bytes) * 256
        if native.module is not None and depth % 16 == 0:
            assert len(PANELS.new_panels(32, depth, name, 1).values) == 32 * format.weight_row_bytes(depth)


# Half the largest step between neighbouring numbers, relative to the largest number of a scale block.
STEPS = {"e4m3": 1 / 28, "e2m1": 1 / 6, "int8": 1 / 254, "uint4": 1 / 14}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in GGUF])
def test_encoded_numbers_are_near(name):
    x_OI = torch.randn(24, 300, generator=torch.Generator().manual_seed(4)) * torch.logspace(-3, 3, 24).unsqueeze(1)
    rows, numbers = encoded(x_OI, name), FORMATS[name].weight_scales.numbers or 300
    scale = rows.codes.scale
    # A power of two may leave numbers above the largest that a code can be: up to 2 / 1.75, and 2 / 1.5.
    step = {"e4m3": 1 / 8, "e2m1": 1 / 4}[rows.codes.element] if scale == "e8m0" else STEPS[rows.codes.element]
    for first in range(0, 300, numbers):
        block = x_OI[:, first : first + numbers]
        error = (rows.numbers()[:, first : first + numbers] - block).abs().amax(1)
        assert (error <= 1.1 * step * block.abs().amax(1)).all()


def rounded(x_TX: torch.Tensor) -> torch.Tensor:
    """What products see of rows that they round to bytes. float64."""
    q_TX, scales_TX = reference.quantise_rows(x_TX)
    return q_TX.double() * scales_TX.double().repeat_interleave(64, dim=1)[:, : x_TX.shape[1]]


@pytest.mark.skipif(native.module is None, reason="this install has no native CPU kernels")
@pytest.mark.parametrize("name", [name for name in NAMES if FORMATS[name].codes.element != "e4m3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_products_that_round_their_inputs_equal_float64(name, dtype):
    """A row's result does not depend on the rows beside it."""
    generator = torch.Generator().manual_seed(1)
    for outputs, depth, lead in ((40, 256, 0), (17, 208, 16), (3, 48, 96), (1, 16, 0), (35, 336, 208)):
        rows = random_rows(name, outputs, depth, lead)
        weight, numbers_OI = replace(PANELS.of_rows(rows, 1), rounds_inputs=True), rows.numbers().double()
        for count in (0, 1, 2, 3, 5, 13, 70):
            x_TX = (3 * torch.randn(count, depth, generator=generator)).to(dtype)
            wide_TX = rounded(x_TX)
            size = multiply(wide_TX.abs(), sizes(rows))
            found = linear(x_TX, weight, dtype=torch.float32)
            assert_near(found, multiply(wide_TX, numbers_OI), size)
            for row in range(0, count, 4):
                assert torch.equal(linear(x_TX[row : row + 1], weight, dtype=torch.float32)[0], found[row])
