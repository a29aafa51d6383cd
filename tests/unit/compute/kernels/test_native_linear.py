"""Matrix products with what stands around them: the reference, and the native kernels over packed weights.

The packed arrangement is decoded here a second time, from its description, in numpy. Results are compared with
intervals: float64, widened at each step by what that step's arithmetic may lose, and rounded where the step is.
"""

import os
import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from test_native_attention import UNIT, bits, chain, numbers, seeded
from torch import Tensor
from torch.library import opcheck

from longhelix.compute.kernels import (
    PANELS,
    PLAIN,
    ROWS,
    TILES,
    KVFormat,
    Weight,
    linear,
    make_weight,
    native,
    reference,
)
from longhelix.compute.kernels.library import activation_arguments
from longhelix.errors import UserError
from longhelix.spec import Activation
from packed_pool import panel_codes
from tiers import few

pytestmark = pytest.mark.unit
needs_native = pytest.mark.skipif(native.module is None, reason="this install has no native CPU kernels")

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FLOATS = ["float32", "bfloat16", "float16"]
SWIGLU = Activation()
NARROW = ["int8", "int4"]
PAIRS = ["bfloat16", *NARROW]  # multiplied as pairs of bfloat16: the inputs are rounded to it
LANES, SCALE_BLOCK = 16, 32


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def plain_weight(weight_OI: Tensor) -> Weight:
    return Weight(weight_OI, name(weight_OI.dtype), *weight_OI.shape, PLAIN)


# ----------------------------------------------------------------------------------------------------------------------
# The packed arrangement, decoded.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Decoded:
    """The matrix (outputs, depth) in float64; of each element the step of its numbers, |scale * stored| + |offset|."""

    values: np.ndarray
    steps: np.ndarray
    sizes: np.ndarray


def panel_numbers(raw: np.ndarray, rows: int, dtype: str) -> np.ndarray:
    """What the bytes of panels stand for; int8 has a sign and a magnitude."""
    codes = panel_codes(raw, rows, dtype, fours=False)
    return np.where(codes & 128, -1.0, 1.0) * (codes & 127) if dtype == "int8" else numbers(codes, dtype)


def decoded(weight: Weight, halves: int = 1) -> Decoded:
    """A panel for every 16 outputs; narrow ones in scale blocks of 32 inputs, each with its scales and offsets."""
    panels = weight.outputs // halves // LANES + (weight.outputs // halves % LANES > 0)
    raw = weight.values.numpy().reshape(halves * panels, -1)
    if weight.dtype in FLOATS:
        by_input = panel_numbers(raw, weight.depth, weight.dtype)
        parts = [by_input, np.zeros_like(by_input), np.abs(by_input)]
    else:
        blocks = raw.reshape(len(raw), weight.depth // SCALE_BLOCK, -1)
        stored = panel_numbers(blocks[..., :-64], SCALE_BLOCK, weight.dtype)
        sides = np.ascontiguousarray(blocks[..., -64:]).view(np.float16).astype(np.float64)
        scales, offsets = sides[..., None, :LANES], sides[..., None, LANES:]
        parts = [scales * stored + offsets, scales + 0 * stored, np.abs(scales * stored) + np.abs(offsets)]
        parts = [part.reshape(len(raw), weight.depth, LANES) for part in parts]

    def rows(part: np.ndarray) -> np.ndarray:  # the padding after each half is left out
        by_output = part.swapaxes(1, 2).reshape(halves, panels * LANES, weight.depth)
        return by_output[:, : weight.outputs // halves].reshape(weight.outputs, weight.depth)

    return Decoded(*map(rows, parts))


def matrix(outputs: int, depth: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = seeded(seed)
    weight_OI = torch.randn(outputs, depth, generator=generator) / depth**0.5
    # Outputs of many sizes, some without any weight, and elements that stand out of their scale block.
    weight_OI *= 2.0 ** torch.randint(-9, 3, (outputs, 1), generator=generator)
    weight_OI[torch.rand(outputs, generator=generator) < 0.1] = 0
    weight_OI[torch.rand(outputs, depth, generator=generator) < 0.02] *= 20
    return weight_OI.to(dtype)


depths = st.sampled_from(range(32, 513, 32))
outputs = st.integers(1, 100)
seeds = st.integers(0, 2**31)


@needs_native
@given(
    depth=st.sampled_from(range(16, 400, 16)),
    width=outputs,
    halves=st.sampled_from([1, 2]),
    dtype=st.sampled_from(FLOATS),
    source=st.sampled_from(DTYPES),
    seed=seeds,
)
def test_floats_are_packed_as_they_are_and_given_back_as_rows(depth, width, halves, dtype, source, seed):
    weight_OI = matrix(halves * width, depth, seed, source)
    weight = make_weight(weight_OI, dtype, halves)
    assert (weight.arrangement, weight.has_rows, weight.outputs, weight.depth) == (PANELS, True, halves * width, depth)
    typed_OI = weight_OI.to(getattr(torch, dtype))
    np.testing.assert_array_equal(decoded(weight, halves).values, typed_OI.double().numpy())
    if halves == 1:
        indices_T = torch.randint(0, width, (9,), generator=seeded(seed))
        assert torch.equal(bits(weight.rows(indices_T)), bits(typed_OI[indices_T]))


@needs_native
@given(depth=depths, width=outputs, halves=st.sampled_from([1, 2]), dtype=st.sampled_from(NARROW), seed=seeds)
def test_narrow_numbers_are_off_by_half_a_step(depth, width, halves, dtype, seed):
    weight_OI = matrix(halves * width, depth, seed)
    weight = make_weight(weight_OI, dtype, halves)
    assert (weight.arrangement, weight.has_rows, weight.outputs, weight.depth) == (PANELS, False, halves * width, depth)
    given_OI = weight_OI.double().numpy()
    kept = decoded(weight, halves)
    blocks = given_OI.reshape(len(given_OI), -1, SCALE_BLOCK)
    least, most = (side.repeat(SCALE_BLOCK, axis=1) for side in (blocks.min(-1), blocks.max(-1)))
    steps, spread = (127, np.maximum(-least, most)) if dtype == "int8" else (15, most - least)
    # float16 has eleven bits, and a last one of 2^-24 near zero; float32 rounds the quotient.
    lost = np.maximum(2.0**-11 * spread / steps, 2.0**-25) + 2 * UNIT * spread / steps
    assert (np.abs(kept.steps - spread / steps) <= lost).all()
    # Half a step, or what the largest numbers lose where the step was rounded down.
    allowed = np.maximum(kept.steps / 2, steps * lost) + 4 * UNIT * (np.abs(given_OI) + spread)
    if dtype == "int4":
        offset = np.abs(least) + 8 * kept.steps
        allowed += np.maximum(2.0**-11 * offset, 2.0**-25)
    assert (np.abs(kept.values - given_OI) <= allowed).all()


@needs_native
@pytest.mark.parametrize("dtype", NARROW)
def test_blocks_of_one_number_or_of_exact_steps_are_stored_exactly(dtype):
    steps_I = torch.arange(-127, 128).float() if dtype == "int8" else torch.arange(16).float() / 4 + 3
    rows_OI = torch.stack((steps_I[torch.arange(64) % len(steps_I)], torch.zeros(64), torch.full((64,), 0.75)))
    rows_OI[0, ::32], rows_OI[0, 1::32] = steps_I[0], steps_I[-1]
    kept = decoded(make_weight(rows_OI, dtype)).values
    np.testing.assert_array_equal(kept[:2], rows_OI[:2].double().numpy())
    # int8: 127 steps of a float16 that is near 0.75 / 127.
    np.testing.assert_allclose(kept[2], 0.75, rtol=0 if dtype == "int4" else 2.0**-11)


# ----------------------------------------------------------------------------------------------------------------------
# Products.
# ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Interval:
    """What a number may be."""

    low: np.ndarray
    high: np.ndarray

    def widened(self, by: np.ndarray | float) -> "Interval":
        """By `by` on either side; an end that is infinite stays so."""
        with np.errstate(invalid="ignore"):
            ends = (self.low, self.low - by), (self.high, self.high + by)
            return Interval(*(np.where(np.isinf(end), end, moved) for end, moved in ends))

    def rounded(self, dtype: torch.dtype) -> "Interval":
        """To nearest in `dtype`, which keeps order. float32 has rounded what it was computed from by a unit."""
        wide = self.widened(UNIT * self.size())
        low, high = (torch.from_numpy(side).to(dtype).double().numpy() for side in (wide.low, wide.high))
        if dtype == torch.bfloat16:  # processors' conversions take numbers below 2^-126 for 0
            low = np.where((low > 0) & (low < 2.0**-126), 0, low)
            high = np.where((high < 0) & (high > -(2.0**-126)), 0, high)
        return Interval(low, high)

    def size(self) -> np.ndarray:
        return np.maximum(np.abs(self.low), np.abs(self.high))

    def times(self, other: "Interval") -> "Interval":
        products = [a * b for a in (self.low, self.high) for b in (other.low, other.high)]
        return Interval(np.minimum.reduce(products), np.maximum.reduce(products))

    def silu(self) -> "Interval":
        ends = [x / (1 + np.exp(-x)) for x in (self.low, self.high)]
        bottom = np.where((self.low < -1.2784645) & (self.high > -1.2784645), -0.27846455, np.inf)
        result = Interval(np.minimum(np.minimum(*ends), bottom), np.maximum(*ends))
        # 2^x to two units of an x that is off by two roundings; below 2^-126 it is 0.
        return result.widened((2 * self.size() + 12) * UNIT * result.size() + 2.0**-120)

    def assert_holds(self, actual: Tensor) -> None:
        values = actual.double().numpy()
        assert values.shape == self.low.shape
        inside = (self.low <= values) & (values <= self.high)  # infinity lies from infinity to infinity
        low, high, beyond = self.low[~inside], self.high[~inside], values[~inside]
        outside = np.maximum(low - beyond, beyond - high)
        assert inside.all(), f"{len(outside) / inside.size:.2%} outside, by up to {outside.max():.3g}"


@dataclass
class Around:
    """What stands around a product, in the dtype of x."""

    bias: Tensor | None = None
    norm: Tensor | None = None
    norm_eps: float = 1e-3
    swiglu: bool = False
    residual: Tensor | None = None

    def run(self, x_TX: Tensor, weight: Weight, dtype: torch.dtype | None = None) -> Tensor:
        return linear(
            x_TX,
            weight,
            bias=self.bias,
            norm=self.norm,
            norm_eps=self.norm_eps,
            activation=SWIGLU if self.swiglu else None,
            residual=self.residual,
            dtype=dtype,
        )


def wide(tensor: Tensor) -> np.ndarray:
    return tensor.double().numpy()


def expected(x_TX: Tensor, weight: Decoded, around: Around, pairs: bool, step: torch.dtype) -> Interval:
    """`step`: what the results of steps after the product are rounded to."""
    depth, exact = x_TX.shape[1], wide(x_TX)
    x = Interval(exact, exact)
    if around.norm is not None:
        normal = exact / np.sqrt((exact**2).mean(-1, keepdims=True) + around.norm_eps)
        # float32: the sum of squares in sixteen lanes, the root and the quotient.
        x = Interval(normal, normal).widened((depth / 16 + 8) * UNIT * np.abs(normal)).rounded(x_TX.dtype)
        factor = wide(around.norm)
        x = x.times(Interval(factor, factor)).rounded(x_TX.dtype)
    if pairs:
        x = Interval(*(wide(torch.from_numpy(side).bfloat16()) for side in (x.low, x.high)))
    middle, radius = (x.low + x.high) / 2, (x.high - x.low) / 2
    # Each of the products and sums, with two more for the scale and the offset of each scale block, rounds.
    lost = radius @ np.abs(weight.values).T + chain(depth * 17 // 16) * (x.size() @ weight.sizes.T)
    product = middle @ weight.values.T
    out = Interval(product, product).widened(lost)
    if around.bias is not None:
        out = Interval(out.low + wide(around.bias), out.high + wide(around.bias)).widened(UNIT * out.size())
    if around.swiglu:
        half = product.shape[1] // 2
        gate, up = (Interval(out.low[:, at], out.high[:, at]).rounded(step) for at in (np.s_[:half], np.s_[half:]))
        out = gate.silu().rounded(step).times(up)
    if around.residual is not None:
        out = out.rounded(step)
        out = Interval(out.low + wide(around.residual), out.high + wide(around.residual))
    return out.rounded(step)


@st.composite
def surroundings(draw) -> dict[str, bool]:
    return {key: draw(st.booleans()) for key in ("bias", "norm", "swiglu", "residual")}


def make_around(rows: int, width: int, depth: int, dtype: torch.dtype, seed: int, **has: bool) -> Around:
    """`width`: outputs, half as many as the weight has with SwiGLU."""
    generator = seeded(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return Around(
        normal(width * (1 + has.get("swiglu", False))) if has.get("bias") else None,
        normal(depth) if has.get("norm") else None,
        swiglu=has.get("swiglu", False),
        # A slice of a wider tensor, as a part of the hidden size is.
        residual=normal(rows, width + 5)[:, 2:-3] if has.get("residual") else None,
    )


def inputs(rows: int, depth: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows of a wider tensor, of many sizes."""
    generator = seeded(seed)
    wide_TX = torch.randn(rows, depth + 7, generator=generator) * 2.0 ** torch.randint(
        -4, 3, (rows, 1), generator=generator
    )
    return wide_TX.to(dtype)[:, 3:-4]


cases = given(
    rows=st.one_of(st.integers(1, 13), st.integers(1, 40)),
    width=outputs,
    depth=depths,
    has=surroundings(),
    dtype=st.sampled_from(DTYPES),
    seed=seeds,
)


@cases
@example(rows=3, width=5, depth=32, has={}, dtype=torch.float32, seed=1)
def test_the_reference_over_rows_is_as_exact_as_its_dtype(rows, width, depth, has, dtype, seed):
    around = make_around(rows, width, depth, dtype, seed, **has)
    weight_OI = matrix(width * (1 + around.swiglu), depth, seed + 1, dtype)
    x_TX = inputs(rows, depth, dtype, seed + 2)
    exact = Decoded(wide(weight_OI), np.zeros(0), np.abs(wide(weight_OI)))
    interval = expected(x_TX, exact, around, pairs=False, step=dtype)
    out_TX = around.run(x_TX, plain_weight(weight_OI))
    assert out_TX.dtype == dtype
    interval.assert_holds(out_TX)
    as_float = around.run(x_TX, plain_weight(weight_OI), torch.float32)
    assert as_float.dtype == torch.float32
    assert torch.equal(as_float, out_TX.float())


@needs_native
@cases
@example(rows=7, width=81, depth=480, has={"swiglu": True}, dtype=torch.float32, seed=1856)  # gates near -88
@example(rows=40, width=33, depth=512, has={"norm": True, "bias": True, "swiglu": True}, dtype=torch.bfloat16, seed=1)
@example(rows=28, width=66, depth=96, has={"swiglu": True}, dtype=torch.bfloat16, seed=2147483648)  # of 8e-40
def test_packed_products_equal_float64_over_decoded_weights(rows, width, depth, has, dtype, seed):
    around = make_around(rows, width, depth, dtype, seed, **has)
    weight_OI = matrix(width * (1 + around.swiglu), depth, seed + 1, dtype)
    x_TX = inputs(rows, depth, dtype, seed + 2)
    before = x_TX.clone()
    for weight_dtype in (*FLOATS, *NARROW):
        weight = make_weight(weight_OI, weight_dtype, 1 + around.swiglu)
        kept = decoded(weight, 1 + around.swiglu)
        out_TX = around.run(x_TX, weight)
        assert out_TX.dtype == dtype
        expected(x_TX, kept, around, weight_dtype in PAIRS, dtype).assert_holds(out_TX)
        if around.residual is None:
            # Logits: rounded nowhere after the norm.
            out_TX = around.run(x_TX, weight, torch.float32)
            assert out_TX.dtype == torch.float32
            expected(x_TX, kept, around, weight_dtype in PAIRS, torch.float32).assert_holds(out_TX)
    assert torch.equal(x_TX, before)


@needs_native
@pytest.mark.parametrize("weight_dtype", FLOATS)
@pytest.mark.parametrize("depth", [16, 48, 80, 1040])
@pytest.mark.parametrize("dtype", DTYPES)
def test_depths_of_odd_multiples_of_a_tile(dtype, depth, weight_dtype):
    around = make_around(7, 21, depth, dtype, 3, norm=True, bias=True, residual=True)
    weight, x_TX = make_weight(matrix(21, depth, 4), weight_dtype), inputs(7, depth, dtype, 5)
    expected(x_TX, decoded(weight), around, weight_dtype in PAIRS, dtype).assert_holds(around.run(x_TX, weight))


@needs_native
@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 0.99), (torch.float16, 0.95)])
def test_packed_and_reference_round_at_the_same_steps(dtype, least):
    """Sums in another order differ by some 2^-22, which moves one rounding in 2^14, or of float16 in 2^11, to the other
    side; a step rounded elsewhere would change half of all results."""
    around = make_around(40, 64, 256, dtype, 6, norm=True, swiglu=True, residual=True, bias=True)
    weight_OI, x_TX = matrix(128, 256, 7, dtype), inputs(40, 256, dtype, 8)
    reference_TX = around.run(x_TX, plain_weight(weight_OI))
    packed_TX = around.run(x_TX, make_weight(weight_OI, name(dtype), halves=2))
    assert (packed_TX == reference_TX).float().mean() > least


IDENTITY = torch.eye(64)


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("as_float", [False, True])
def test_steps_are_rounded_where_the_documentation_says(as_float, dtype):
    """Through an identity there is no sum: what is left are the roundings, here one at a time."""
    weight = make_weight(IDENTITY, "float32")
    out_dtype = torch.float32 if as_float else dtype
    # An element that its norm and its weight each round, and that float32 would round elsewhere.
    x_TX = inputs(40, 64, dtype, 9)
    norm = (1 + torch.randn(64, generator=seeded(10)) / 3).to(dtype)
    result = Around(norm=norm).run(x_TX, weight, out_dtype)
    normal = x_TX.double() / (x_TX.double().square().mean(-1, keepdim=True) + 1e-3).sqrt()
    twice, once = (normal.to(dtype) * norm), (normal * norm.double()).to(dtype)
    assert (result.to(dtype) == twice).float().mean() > 0.99
    assert (once == twice).float().mean() < 0.95
    # The bias is added before the one rounding; a residual after it.
    other = torch.randn(64, generator=seeded(11)).to(dtype) * 3
    scaled = make_weight(IDENTITY * 1.2345, "float32")
    product = x_TX.double() * float(torch.tensor(1.2345))
    biased = Around(bias=other).run(x_TX, scaled, out_dtype)
    assert (biased.to(dtype) == (product + other).to(dtype)).float().mean() > 0.99
    if as_float:
        # float32's own roundings, of the product and of the sum.
        assert bool(((biased - (product + other)).abs() <= 2 * UNIT * (product.abs() + other.abs())).all())
        return
    added = Around(residual=other.expand(40, 64).contiguous()).run(x_TX, scaled)
    assert (added == product.to(dtype) + other).float().mean() > 0.99
    assert (added == (product + other).to(dtype)).float().mean() < 0.95
    # SwiGLU: gate, up, silu and the product are each rounded.
    both = make_weight(torch.cat((IDENTITY * 1.2345, IDENTITY * 0.777)), "float32", halves=2)
    gated = Around(swiglu=True).run(x_TX, both)
    gate, up = product.to(dtype), (x_TX.double() * float(torch.tensor(0.777))).to(dtype)
    stepwise = torch.nn.functional.silu(gate.double()).to(dtype) * up
    assert (gated == stepwise).float().mean() > 0.99
    assert (gated == (torch.nn.functional.silu(gate.double()) * up.double()).to(dtype)).float().mean() < 0.95


@needs_native
@pytest.mark.parametrize("gate", [-1e4, -200.0, -100.0, -87.5, -1.0, -0.0, 0.0, 88.0, 1e4])
def test_gates_of_any_size_do_not_overflow(gate):
    weight = make_weight(torch.cat((torch.eye(32), torch.eye(32))), "float32", halves=2)
    x_TX = torch.full((3, 32), gate)
    wanted = torch.nn.functional.silu(x_TX.double()) * x_TX.double()
    # Of large gates 2^x is taken at a rounded x, whose error is in proportion; what is below 2^-126 is 0.
    tolerance = (2 * abs(gate) + 12) * UNIT if gate > -126 * 0.6931472 else 1.0
    torch.testing.assert_close(
        linear(x_TX, weight, activation=SWIGLU).double(), wanted, rtol=tolerance, atol=abs(gate) ** 2 * 2.0**-126
    )


def activated(x_TX: Tensor, activation: Activation) -> Tensor:
    """An activation by its definition, in float64."""
    gate_TX, up_TX = x_TX.double().chunk(2, dim=1) if activation.gated else (x_TX.double(), None)
    if activation.function == "clamped_swiglu":
        gate_TX, up_TX = gate_TX.clamp(max=7), None if up_TX is None else up_TX.clamp(-7, 7) + 1
    out_TX = {
        "silu": lambda x: x / (1 + (-x).exp()),
        "gelu": lambda x: x * torch.special.erfc(-x / 2**0.5) / 2,
        "gelu_tanh": lambda x: x * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh()) / 2,
        "relu_squared": lambda x: x.clamp(min=0) ** 2,
        "clamped_swiglu": lambda x: x / (1 + (-1.702 * x).exp()),
    }[activation.function](gate_TX)
    return out_TX if up_TX is None else out_TX * up_TX


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_native)])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("function", ["silu", "gelu", "gelu_tanh", "relu_squared", "clamped_swiglu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_are_what_they_are_by_definition(dtype, function, gated, packed):
    """Of numbers of any size, and of as many columns as fill no panel."""
    activation, columns = Activation(function, gated), 24
    weight_OI = torch.eye(32)[torch.randperm(32, generator=seeded(3))[:columns]]
    weight_OI = torch.cat((weight_OI, torch.eye(32)[:columns])) if gated else weight_OI
    weight = make_weight(weight_OI, "float32", activation.projections) if packed else plain_weight(weight_OI)
    x_TX = (torch.randn(13, 32, generator=seeded(4)) * 2.0 ** torch.arange(-9, 4)[:, None]).to(dtype)
    found_TX = linear(x_TX, weight, activation=activation)
    wanted_TX = activated(x_TX.double() @ weight_OI.double().T, activation)
    tolerance = {torch.float32: 2**-18, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    # Of negative numbers the functions are small differences of large ones. Below its normal numbers a dtype has steps.
    size_T1, number = x_TX.double().abs().amax(1, keepdim=True), torch.finfo(dtype)
    bound_TX = tolerance * (wanted_TX.abs() + size_T1**activation.projections / 16)
    bound_TX += number.smallest_normal * number.eps * (1 + size_T1)
    assert ((found_TX.double() - wanted_TX).abs() <= bound_TX).all()


@needs_native
@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16", "int8", "w8a8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_in_float32_is_not_rounded_to_the_dtype_of_rows(dtype, weight_dtype):
    weight, x_TX = make_weight(matrix(40, 96, 5), weight_dtype), inputs(7, 96, dtype, 6)
    norm = 1 + torch.randn(96, generator=seeded(7)) / 300
    exact_TX = x_TX.double() * (x_TX.double().square().mean(1, keepdim=True) + 1e-3).rsqrt() * norm.double()
    normed_TX = reference.rms_norm(x_TX, norm, 1e-3)
    assert (normed_TX == exact_TX.to(dtype)).float().mean() > 0.99
    assert (reference.rms_norm(x_TX, norm.to(dtype), 1e-3) == exact_TX.to(dtype)).float().mean() < 0.9
    found_TO = linear(x_TX, weight, norm=norm, norm_eps=1e-3)
    assert torch.equal(found_TO, linear(normed_TX, weight))


@pytest.fixture
def threads():
    """native.set_num_threads, undone after the test."""
    before = torch.get_num_threads()
    yield native.set_num_threads
    native.set_num_threads(before)


@needs_native
@pytest.mark.parametrize(
    "has", [{}, {"norm": True, "bias": True, "residual": True}, {"norm": True, "swiglu": True}], ids=str
)
@pytest.mark.parametrize("weight_dtype", [*FLOATS, *NARROW])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_bits_do_not_depend_on_its_batch_or_on_threads(dtype, weight_dtype, has, threads):
    around = make_around(40, 87, 288, dtype, 12, **has)
    weight = make_weight(matrix(87 * (1 + around.swiglu), 288, 13), weight_dtype, 1 + around.swiglu)
    x_TX = inputs(40, 288, dtype, 14)
    threads(1)
    whole_TX = around.run(x_TX, weight)
    assert len(torch.unique(whole_TX, dim=0)) == 40
    for count in (1, 2, 3):
        threads(count)
        for first, last in [
            (0, 40),
            (3, 40),
            *((5, 5 + rows) for rows in range(1, 17)),
            *((at, at + 1) for at in range(40)),
        ]:
            part = replace(around, residual=around.residual if around.residual is None else around.residual[first:last])
            assert torch.equal(bits(part.run(x_TX[first:last], weight)), bits(whole_TX[first:last])), (
                count,
                first,
                last,
            )


def sparse(tensor: Tensor) -> Tensor:
    """The same numbers, with others between them."""
    return torch.stack((tensor, tensor + 1), dim=-1)[..., 0]


@needs_native
@pytest.mark.parametrize("part", ["x", "bias", "norm", "residual"])
@pytest.mark.parametrize("weight_dtype", ["float32", "int4"])
def test_inputs_and_what_is_around_them_may_be_any_view(weight_dtype, part):
    around = make_around(5, 40, 64, torch.float32, 15, norm=True, bias=True, residual=True)
    weight, x_TX = make_weight(matrix(40, 64, 16), weight_dtype), inputs(5, 64, torch.float32, 17)
    wanted = around.run(x_TX, weight)
    if part == "x":
        assert torch.equal(around.run(sparse(x_TX), weight), wanted)
        assert torch.equal(around.run(x_TX.T.contiguous().T, weight), wanted)
    else:
        assert torch.equal(replace(around, **{part: sparse(getattr(around, part))}).run(x_TX, weight), wanted)


@needs_native
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_residual_of_the_inputs_dtype_is_added_to_a_float32_output(dtype):
    around = make_around(5, 40, 64, dtype, 18, residual=True)
    weight, x_TX = make_weight(matrix(40, 64, 19), "float32"), inputs(5, 64, dtype, 20)
    out_TX = around.run(x_TX, weight, torch.float32)
    expected(x_TX, decoded(weight), around, False, torch.float32).assert_holds(out_TX)


def in_new_process(program: str, **environment: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, f"ended with {result.returncode}: {result.stderr[-2000:]}"


@needs_native
def test_fewer_threads_than_asked_for_do_all_of_the_work():
    """OpenMP may start fewer: it has a limit, and with OMP_DYNAMIC it goes by the load."""
    in_new_process(
        """if True:
        import torch
        from longhelix.compute.kernels import TILES, KVFormat, linear, make_weight, native, partial_attention, write_kv
        native.set_num_threads(4)
        weight_OI, x_TX = torch.randn(256, 64), torch.randn(40, 64)
        for rows in (1, 40):
            linear(x_TX[:rows], make_weight(torch.full_like(weight_OI, torch.nan), "float32"))
            out_TX = linear(x_TX[:rows], make_weight(weight_OI, "float32"))
            torch.testing.assert_close(out_TX, x_TX[:rows] @ weight_OI.T)
        layer = KVFormat("float32", 16, 1, 64, 64, TILES).new_layer(4, torch.device("cpu"))
        layer.values.fill_(255)
        write_kv(x_TX[:, None], x_TX[:, None], layer, torch.arange(40))
        tables = torch.tensor([0, 1, 2]), torch.tensor([[0, 3]]), torch.tensor([0, 40]), torch.arange(1, 41)
        out_TqC, lse_Tq = partial_attention(torch.zeros(40, 1, 64), layer, *tables, 1.0)
        torch.testing.assert_close(lse_Tq[:, 0], torch.arange(1.0, 41).log())
        torch.testing.assert_close(out_TqC[:, 0], x_TX.cumsum(0) / torch.arange(1.0, 41)[:, None], rtol=1e-4, atol=1e-5)
        """,
        OMP_THREAD_LIMIT="1",
    )


@needs_native
def test_numbers_that_the_kernels_do_not_know_are_refused():
    x_TX, weight = torch.randn(3, 64), make_weight(matrix(20, 64, 21), "float32")
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        linear(x_TX.double(), weight)
    with pytest.raises(ValueError, match="float32, bfloat16 or float16"):
        linear(x_TX, weight, dtype=torch.float64)
    with pytest.raises(ValueError, match="a weight does not hold"):
        native.module.Weight(weight.values.data_ptr(), native.module.Number.fp8, 64)


@pytest.mark.parametrize("as_op", [False, True])
@pytest.mark.parametrize("arrangement", ["plain", pytest.param("panels", marks=needs_native)])
@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("rows have 32 inputs, but the weight takes 64", {"x": torch.ones(3, 32)}),
        ("rows have 128 inputs, but the weight takes 64", {"x": torch.ones(3, 128)}),
        ("give them two dimensions", {"x": torch.ones(64)}),
        ("rows of torch.int8 have no scales", {"x": torch.ones(3, 64, dtype=torch.int8), "dtype": torch.float32}),
        ("a product cannot have the dtype torch.int32: set dtype", {"dtype": torch.int32}),
        ("rows of torch.float32 have a norm of torch.bfloat16", {"norm": torch.ones(64).bfloat16()}),
        ("rows of 64 inputs have a norm of shape", {"norm": torch.ones(32)}),
        ("has a residual of shape", {"residual": torch.ones(2, 20)}),
        ("has a residual of shape", {"residual": torch.ones(3, 20), "activation": SWIGLU}),
        ("20 outputs have a bias of shape", {"bias": torch.ones(16)}),
        ("rows of torch.float32 have a bias of torch.bfloat16", {"bias": torch.ones(20).bfloat16()}),
    ],
)
def test_what_a_product_would_read_as_something_else_is_refused(words, changed, arrangement, as_op, monkeypatch):
    weight_OI = matrix(20, 64, 21)
    weight = make_weight(weight_OI, "float32", 2) if arrangement == "panels" else plain_weight(weight_OI)
    if as_op:
        monkeypatch.setattr("longhelix.compute.kernels.products.is_compiling", lambda: True)
    with pytest.raises(ValueError, match=words):
        linear(changed.get("x", torch.ones(3, 64)), weight, **{name: changed[name] for name in changed if name != "x"})


@needs_native
def test_no_rows_give_no_rows_and_read_nothing():
    weight = make_weight(matrix(20, 64, 21), "float32")
    assert linear(torch.zeros(0, 64), weight).shape == (0, 20)
    # A row of this depth is longer than all memory that the process has around the one that it works in.
    in_new_process(
        """if True:
        import torch
        from longhelix.compute.kernels import linear, make_weight, native
        native.set_num_threads(1)
        weight = make_weight(torch.zeros(16, 10**6, dtype=torch.bfloat16), "bfloat16")
        assert linear(torch.zeros(0, 10**6), weight).shape == (0, 16)
        """
    )


@needs_native
@pytest.mark.parametrize("weight_dtype", [*FLOATS, *NARROW])
@pytest.mark.parametrize("rows", [0, 1, 13])
def test_a_rank_that_owns_nothing_of_a_weight_multiplies_it_as_others_do_theirs(rows, weight_dtype):
    """Without inputs the product is zero and what stands around it stays; without outputs nothing is left."""
    no_inputs, no_outputs = (make_weight(torch.zeros(*shape), weight_dtype) for shape in ((20, 0), (0, 64)))
    assert no_inputs.arrangement is PANELS
    assert no_outputs.arrangement is PANELS
    bias, residual = inputs(1, 20, torch.float32, 31)[0], torch.randn(rows, 20)
    assert torch.equal(linear(torch.zeros(rows, 0), no_inputs), torch.zeros(rows, 20))
    assert torch.equal(linear(torch.zeros(rows, 0), no_inputs, bias=bias, residual=residual), bias + residual)
    around = {"norm": torch.ones(64), "norm_eps": 1e-5, "activation": SWIGLU}
    assert linear(torch.randn(rows, 64), no_outputs, **around).shape == (rows, 0)


# ----------------------------------------------------------------------------------------------------------------------
# Registration, and what is refused.
# ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "weight_dtype", ["plain", *(pytest.param(dtype, marks=needs_native) for dtype in (*FLOATS, *NARROW))]
)
@pytest.mark.parametrize("dtype", few([torch.bfloat16, torch.float32]))
@pytest.mark.parametrize("rows", [5, 0])
def test_torch_accepts_the_op_and_its_fake(rows, dtype, weight_dtype):
    for has in ({}, {"norm": True, "bias": True, "residual": True}, {"swiglu": True, "bias": True}):
        around = make_around(rows, 19, 64, dtype, 22, **has)
        weight_OI = matrix(19 * (1 + around.swiglu), 64, 23, dtype)
        packed = weight_dtype != "plain"
        weight = make_weight(weight_OI, weight_dtype, 1 + around.swiglu) if packed else plain_weight(weight_OI)
        x_TX = inputs(rows, 64, dtype, 24) if rows else torch.zeros(0, 64, dtype=dtype)
        residual = around.residual.contiguous() if around.residual is not None and not rows else around.residual
        activation = activation_arguments(SWIGLU if around.swiglu else None)
        call = x_TX, weight.values, around.bias, around.norm, 1e-3, *activation, residual
        for out_dtype in (dtype,) if has.get("residual") else (dtype, torch.float32):
            shape = weight.dtype, weight.outputs, weight.depth, weight.arrangement.name, weight.lead, False
            results = opcheck(torch.ops.longhelix.linear.default, (*call, out_dtype, None, *shape))
            assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("packed", [False, pytest.param(True, marks=needs_native)])
def test_compiled_without_a_break_is_one_node_and_the_same_bits(packed):
    torch._dynamo.reset()
    weight_OI = matrix(2 * 24, 64, 25)
    weight = make_weight(weight_OI, "float32", halves=2) if packed else plain_weight(weight_OI)
    around = make_around(6, 24, 64, torch.float32, 26, norm=True, bias=True, residual=True, swiglu=True)
    x_TX = inputs(6, 64, torch.float32, 27)
    graphs: list[list[str]] = []

    def record(graph_module, example_inputs):
        graphs.append([str(node.target) for node in graph_module.graph.nodes if node.op == "call_function"])
        return graph_module.forward

    compiled = torch.compile(lambda x_TX: around.run(x_TX, weight) + 1, fullgraph=True, backend=record)
    assert torch.equal(compiled(x_TX), around.run(x_TX, weight) + 1)
    ((first, *rest),) = graphs
    assert first.removesuffix(".default") == "longhelix.linear"
    assert len(rest) == 1


def test_weights_that_cannot_be_packed_are_kept_as_rows(monkeypatch):
    unfit = [torch.zeros(4, 24), torch.zeros(0, 24), torch.zeros(4, 32, device="meta")]
    for weight_OI in unfit:
        weight = make_weight(weight_OI, "float32")
        assert weight.values is weight_OI
        assert weight.arrangement is PLAIN
        assert weight.has_rows
    monkeypatch.setattr(native, "module", None)
    weight_OI = matrix(5, 32, 28)
    weight = make_weight(weight_OI, "float32")
    assert weight.values is weight_OI
    assert torch.equal(weight.rows(torch.tensor([4, 0, 4])), weight_OI[[4, 0, 4]])
    assert make_weight(torch.zeros(0, 40), "int8").outputs == 0


@pytest.mark.parametrize("dtype", NARROW)
def test_a_narrow_weight_that_cannot_be_packed_is_refused_in_words(dtype, monkeypatch):
    message = (
        f"weight_dtype {dtype} needs the native CPU kernels and weights whose number of inputs is a multiple of "
        "32, but a weight has 48: set weight_dtype to the model's dtype"
    )
    with pytest.raises(UserError) as refused:
        make_weight(torch.zeros(4, 48), dtype)
    assert str(refused.value) == message
    with pytest.raises(UserError, match=f"weight_dtype {dtype} needs the native CPU kernels"):
        make_weight(torch.zeros(4, 64, device="meta"), dtype)
    monkeypatch.setattr(native, "module", None)
    with pytest.raises(UserError, match=f"weight_dtype {dtype} needs the native CPU kernels"):
        make_weight(torch.zeros(4, 64), dtype)


CUDA = torch.device("cuda")


@needs_native
@pytest.mark.parametrize("dtype", [*FLOATS, "fp8", *NARROW])
def test_a_pool_is_packed_where_the_kernels_can_read_it(dtype):
    format = KVFormat.choose(dtype, 32, 2, 80, 96, CPU)
    assert format == KVFormat(dtype, 32, 2, 80, 96, TILES)
    if dtype in FLOATS:
        assert KVFormat.choose(dtype, 16, 1, 576, 512, CPU, shared_values=True).arrangement is TILES


@pytest.mark.parametrize("dtype", [*FLOATS, "fp8", *NARROW])
@pytest.mark.parametrize(
    ("block_tokens", "key_size", "value_size", "shared_values", "has_native"),
    [
        (8, 64, 64, False, True),
        (16, 24, 24, False, True),
        (16, 64, 24, False, True),
        (16, 64, 64, False, False),
        (16, 576, 520, True, True),
    ],
    ids=["block", "keys", "values", "install", "shared"],
)
def test_a_pool_that_cannot_be_packed_is_in_rows_or_refused_in_words(
    block_tokens, key_size, value_size, shared_values, has_native, dtype, monkeypatch
):
    if not has_native:
        monkeypatch.setattr(native, "module", None)
    arguments = dtype, block_tokens, 2, key_size, value_size, CPU, shared_values
    if dtype in FLOATS:
        assert KVFormat.choose(*arguments).arrangement is ROWS
        return
    with pytest.raises(UserError) as refused:
        KVFormat.choose(*arguments)
    assert str(refused.value) == (
        f"kv_dtype {dtype} needs the native CPU kernels, KV blocks of a multiple of 16 tokens and head sizes of a "
        "multiple of 16: set kv_dtype to bfloat16"
    )


def test_other_devices_have_rows_and_no_int4():
    for dtype in (*FLOATS, "fp8", "int8"):
        assert KVFormat.choose(dtype, 16, 2, 64, 64, CUDA).arrangement is ROWS
    with pytest.raises(UserError, match="kv_dtype int4 needs the native CPU kernels"):
        KVFormat.choose("int4", 16, 2, 64, 64, CUDA)


def test_a_rank_without_kv_heads_is_refused_nothing():
    for dtype in (*FLOATS, "fp8", *NARROW):
        format = KVFormat.choose(dtype, 8, 0, 24, 24, CPU)
        assert format.arrangement is ROWS
        assert format.block_bytes == 0
        assert format.new_layer(5, CPU).values.numel() == 0
