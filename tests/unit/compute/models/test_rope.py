import math
from itertools import pairwise

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from longhelix.compute.kernels.angles import rotation
from longhelix.compute.kernels.reference import rotate_heads as rotate
from longhelix.compute.models.rope import inverse_frequencies
from longhelix.spec import ModelSpec, RopeSpec, read_hf_config
from toy_model import attention_of

pytestmark = pytest.mark.unit

# transformers computes frequencies in float32: a few roundings of 2**-24 each.
FLOAT32_ROUNDINGS = 2e-6
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.01 * pair for pair in range(32)],
    "long_factor": [1.0 + 0.9 * pair for pair in range(32)],
    "original_max_position_embeddings": 4096,
}
SETTINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic with original positions": {
        "rope_type": "dynamic",
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
    },
    "llama3": LLAMA3,
    "llama3 of 3.2": LLAMA3 | {"factor": 32.0},
    "yarn": YARN,
    "yarn with attention factor": YARN | {"attention_factor": 0.75},
    "yarn with mscale": YARN | {"mscale": 0.707, "mscale_all_dim": 1.2},
    "yarn with mscale alone": YARN | {"mscale": 0.707},
    "yarn untruncated": YARN | {"truncate": False},
    "yarn with betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn with equal betas": YARN | {"beta_fast": 4.0, "beta_slow": 4.0, "truncate": False},
    "yarn of factor below 1": YARN | {"factor": 0.5, "mscale": 0.707, "mscale_all_dim": 1.2},
    "yarn of a short context": YARN | {"original_max_position_embeddings": 64},
    "yarn of a long context": YARN | {"original_max_position_embeddings": 1_000_000},
    "longrope": LONGROPE,
    "longrope with factor": LONGROPE | {"factor": 8.0},
    "longrope of factor below 1": LONGROPE | {"factor": 0.5},
    "longrope with attention factor": LONGROPE | {"attention_factor": 1.1},
}
THETAS = (1e4, 1e5, 5e5, 1e6)
MILLIONS = (0, 1, 2, 4095, 65_537, 999_999, 1_000_000, 3_141_593, 9_999_999, 15_999_999, 16_000_000)
BEYOND_31_BITS = 2**31 + 5


def configured(rope, theta: float) -> tuple[LlamaConfig, ModelSpec]:
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=16_384,
        rope_parameters=rope | {"rope_theta": theta},
    )
    return config, read_hf_config(config.to_dict())


def frequencies_of(rope: RopeSpec, head_size: int, length: int = 1) -> torch.Tensor:
    return torch.tensor(inverse_frequencies(rope, head_size, length), dtype=torch.float64)


@pytest.mark.parametrize("length", [100, 4096, 4097, 16_384, 16_385, 100_000])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("name", SETTINGS)
def test_frequencies_and_attention_factor_are_those_of_transformers(name, theta, length):
    config, spec = configured(SETTINGS[name], theta)
    if attention_of(spec).rope.scaling.kind == "default":
        expected, attention_factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, attention_factor = ROPE_INIT_FUNCTIONS[attention_of(spec).rope.scaling.kind](config, seq_len=length)
    found = frequencies_of(attention_of(spec).rope, attention_of(spec).head_size, length)
    torch.testing.assert_close(found, expected.double(), rtol=FLOAT32_ROUNDINGS, atol=0.0)
    assert attention_of(spec).rope.scaling.attention_factor == attention_factor


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("length", [1000, 20_000])
def test_rotation_is_that_of_transformers_where_float32_is_enough(name, length):
    config, spec = configured(SETTINGS[name], 10_000.0)
    positions_T = torch.arange(length - 50, length)
    cos_1TC, sin_1TC = LlamaRotaryEmbedding(config)(torch.zeros(1), positions_T[None])
    frequencies_TR = frequencies_of(attention_of(spec).rope, 64, length).expand(50, -1)
    cos_TR, sin_TR = rotation(positions_T, frequencies_TR, attention_of(spec).rope.scaling.attention_factor)
    # Their float32 angle is off by a few roundings of the largest angle itself.
    tolerance = 4 * length * 2.0**-24
    torch.testing.assert_close(torch.cat([cos_TR, cos_TR], -1), cos_1TC[0], rtol=0.0, atol=tolerance)
    torch.testing.assert_close(torch.cat([sin_TR, sin_TR], -1), sin_1TC[0], rtol=0.0, atol=tolerance)


def test_dynamic_and_longrope_change_at_their_length_and_no_other_kind_does():
    for name, rope in SETTINGS.items():
        spec = configured(rope, 10_000.0)[1]
        by_length = [
            inverse_frequencies(attention_of(spec).rope, 64, length)
            for length in (1, 4096, 4097, 16_384, 16_385, 99_999)
        ]
        changes = [before != after for before, after in pairwise(by_length)]
        if name.startswith("dynamic"):
            assert changes == [False, False, False, True, True]
        elif name.startswith("longrope"):
            assert changes == [False, True, False, False, False]
        else:
            assert changes == [False] * 5


def test_divisors_divide_the_plain_frequencies():
    divisors = tuple(1.0 + pair for pair in range(32))
    plain, divided = frequencies_of(RopeSpec(), 64), frequencies_of(RopeSpec(divisors=divisors), 64)
    assert torch.equal(divided, plain / torch.tensor(divisors, dtype=torch.float64))


def test_llama3_in_gguf_form_is_llama3():
    rope = attention_of(configured(LLAMA3, 500_000.0)[1]).rope
    plain, scaled = frequencies_of(RopeSpec(theta=rope.theta), 64), frequencies_of(rope, 64)
    divisors = tuple((plain / scaled).tolist())
    gguf = RopeSpec(theta=500_000.0, divisors=divisors)
    torch.testing.assert_close(frequencies_of(gguf, 64), scaled, rtol=1e-15, atol=0.0)


def exact_frequencies(theta: float, head_size: int) -> list:
    return [mpmath.mpf(theta) ** (mpmath.mpf(-channel) / head_size) for channel in range(0, head_size, 2)]


def exact_rotation(position: int, theta: float, head_size: int) -> tuple[torch.Tensor, ...]:
    """Angle, cos and sin by 50 digits, each rounded once to float64."""
    with mpmath.workdps(50):
        angles = [position * frequency for frequency in exact_frequencies(theta, head_size)]
        columns = [[float(function(angle)) for angle in angles] for function in (mpmath.mpf, mpmath.cos, mpmath.sin)]
    return tuple(torch.tensor(column, dtype=torch.float64) for column in columns)


def mp_float32(value) -> np.float32:
    """A number of many digits, rounded once to float32 (24 bits, to nearest even)."""
    with mpmath.workprec(24):
        return np.float32(float(+value))


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("head_size", [64, 128])
def test_angles_round_to_the_exact_float32_at_sixteen_million_and_beyond(head_size, theta):
    frequencies_R = frequencies_of(RopeSpec(theta=theta), head_size)
    with mpmath.workdps(50):
        exact = exact_frequencies(theta, head_size)
    for position in (*MILLIONS, BEYOND_31_BITS):
        angles_R = (torch.tensor(position).double() * frequencies_R).float()
        with mpmath.workdps(50):
            products = [position * frequency for frequency in exact]
        expected = np.array([mp_float32(product) for product in products])
        assert np.array_equal(angles_R.numpy(), expected), position


@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("head_size", [64, 128])
def test_cos_and_sin_are_exact_to_float32_at_sixteen_million(head_size, theta):
    frequencies_TR = frequencies_of(RopeSpec(theta=theta), head_size).expand(len(MILLIONS), -1)
    cos_TR, sin_TR = rotation(torch.tensor(MILLIONS), frequencies_TR, 1.0)
    assert (cos_TR.dtype, sin_TR.dtype) == (torch.float32, torch.float32)
    for row, position in enumerate(MILLIONS):
        _, cos_R, sin_R = exact_rotation(position, theta, head_size)
        assert (cos_TR[row] - cos_R).abs().max() <= 6e-8, position
        assert (sin_TR[row] - sin_R).abs().max() <= 6e-8, position


@pytest.mark.parametrize("theta", THETAS)
def test_positions_beyond_31_bits_do_not_wrap(theta):
    frequencies_TR = frequencies_of(RopeSpec(theta=theta), 128)[None]
    cos_TR, sin_TR = rotation(torch.tensor([BEYOND_31_BITS]), frequencies_TR, 1.0)
    _, cos_R, sin_R = exact_rotation(BEYOND_31_BITS, theta, 128)
    # A float64 angle of 2**31 is known to 2**-21.
    assert (cos_TR[0] - cos_R).abs().max() <= 1e-6
    assert (sin_TR[0] - sin_R).abs().max() <= 1e-6


@pytest.mark.parametrize("theta", THETAS)
def test_float32_angles_would_be_far_off_at_sixteen_million(theta):
    position = 16_000_000
    angles_R, cos_R, _ = exact_rotation(position, theta, 128)
    frequencies_R = 1.0 / theta ** (torch.arange(0, 128, 2).float() / 128)
    float32_angles_R = torch.tensor(position).float() * frequencies_R
    assert (float32_angles_R - angles_R).abs().max() > 0.1
    assert (float32_angles_R.cos() - cos_R).abs().max() > 0.1


def test_the_attention_factor_multiplies_cos_and_sin():
    frequencies_TR = frequencies_of(RopeSpec(), 64).expand(3, -1)
    positions_T = torch.tensor([0, 5, 12_345])
    cos_TR, sin_TR = rotation(positions_T, frequencies_TR, 1.0)
    scaled_cos_TR, scaled_sin_TR = rotation(positions_T, frequencies_TR, 1.25)
    torch.testing.assert_close(scaled_cos_TR, 1.25 * cos_TR, rtol=2.0**-22, atol=0.0)
    torch.testing.assert_close(scaled_sin_TR, 1.25 * sin_TR, rtol=2.0**-22, atol=0.0)
    assert torch.equal(scaled_cos_TR[0], torch.full((32,), 1.25))


@given(
    num_tokens=st.integers(1, 9),
    num_heads=st.integers(0, 5),
    pairs=st.sampled_from([1, 4, 32]),
    seed=st.integers(0, 99),
)
def test_rotate_is_that_of_transformers(num_tokens, num_heads, pairs, seed):
    generator = torch.Generator().manual_seed(seed)
    x_TQC = torch.randn(num_tokens, num_heads, 2 * pairs, generator=generator)
    angles_TR = 100 * torch.randn(num_tokens, pairs, generator=generator)
    cos_TR, sin_TR = angles_TR.cos(), angles_TR.sin()
    cos_TC, sin_TC = torch.cat([cos_TR, cos_TR], -1), torch.cat([sin_TR, sin_TR], -1)
    expected, _ = apply_rotary_pos_emb(x_TQC, x_TQC, cos_TC, sin_TC, unsqueeze_dim=1)
    torch.testing.assert_close(rotate(x_TQC, cos_TR, sin_TR), expected, rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotate_keeps_the_dtype_and_rounds_once(dtype):
    x_TQC = torch.randn(7, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    frequencies_TR = frequencies_of(RopeSpec(), 64).expand(7, -1)
    cos_TR, sin_TR = rotation(torch.arange(7) + 1_000_000, frequencies_TR, 1.0)
    before = x_TQC.clone()
    rotated_TQC = rotate(x_TQC, cos_TR, sin_TR)
    assert rotated_TQC.dtype == dtype
    assert torch.equal(rotated_TQC, rotate(x_TQC.float(), cos_TR, sin_TR).to(dtype))
    assert torch.equal(x_TQC, before)


def test_scores_depend_on_the_distance_alone_even_at_sixteen_million():
    generator = torch.Generator().manual_seed(1)
    query_1QC, key_1QC = (torch.randn(1, 1, 128, generator=generator) for _ in range(2))
    frequencies_TR = frequencies_of(RopeSpec(theta=5e5), 128)[None]

    def score(query_position: int, key_position: int) -> float:
        rotated = [
            rotate(x, *rotation(torch.tensor([position]), frequencies_TR, 1.0))
            for x, position in ((query_1QC, query_position), (key_1QC, key_position))
        ]
        return float((rotated[0] * rotated[1]).sum())

    near = score(777, 0)
    assert math.isclose(score(16_000_000, 16_000_000 - 777), near, abs_tol=1e-4)
    assert not math.isclose(score(778, 0), near, abs_tol=1e-2)
