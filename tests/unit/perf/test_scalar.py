"""A compiled cost gives what the formula over arrays gives, whatever numbers it is made of."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhelix.perf.layouts import Layouts
from longhelix.perf.scalar import scalar
from longhelix.perf.setting import Dtypes, Setting
from longhelix.perf.step import step_seconds
from longhelix.perf.step_cost import StepCost
from longhelix.scheduler.work import Work
from longhelix.spec import read_hf_config
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_system
from toy_model import latents_of

pytestmark = pytest.mark.unit

NUMBERS = [math.inf, -math.inf, math.nan, -2.0, -0.5, 0.5, 2.0, 3.0, 1e-305, 1e-300, -1e-300, 1e300, -1e300, 2.0**1000]
NUMBERS += [np.float64(-3.5), np.float64(np.inf), np.int64(-7), 7]
OPERATIONS = {
    "x + n": lambda x, n: x + n,
    "n - x": lambda x, n: n - x,
    "x * n": lambda x, n: x * n,
    "x / n": lambda x, n: x / n,
    "n / x": lambda x, n: n / x,
    "n ** x": lambda x, n: n**x,
    "x // n": lambda x, n: x // n,
    "x < n": lambda x, n: np.where(x < n, x, n),
    "x >= n": lambda x, n: np.where(x >= n, n, x),
    "least": lambda x, n: np.minimum(x, n),
    "most": lambda x, n: np.maximum(n, x),
    "x * n * 2 ** 60": lambda x, n: x * n * 2.0**60,
    "x * n / 2 ** 60": lambda x, n: x * n / 2.0**60,
    "x / n / 2 ** 60": lambda x, n: x / n / 2.0**60,
    "x * 2 ** -60 / n": lambda x, n: x * 2.0**-60 / n,
    "n": lambda x, n: n + np.zeros_like(x),
}


CASES = [(name, number) for name in OPERATIONS for number in NUMBERS if name != "n ** x" or abs(number) < 1e100]


@pytest.mark.parametrize(("name", "number"), CASES)
def test_a_compiled_formula_has_the_numbers_of_the_plain_one(name, number):
    """Among them are those whose repr is no Python (inf, nan, numpy's), or binds otherwise than the number (-2 ** x),
    and those at the ends of what a float holds."""
    compute = OPERATIONS[name]
    with np.errstate(all="ignore"):
        compiled = scalar(lambda inputs: compute(inputs[1], number), ["first"], "later")(0.0)
        for value in (1.0, 3.0, 77.0):
            plain = np.asarray(compute(np.array([value]), number)).item()
            assert compiled(value) == pytest.approx(plain, rel=0, abs=0, nan_ok=True)


def latent_model(**settings):
    base = {
        "model_type": "deepseek_v3",
        "vocab_size": 99,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "max_position_embeddings": 1000,
    }
    return read_hf_config(base | settings)


@st.composite
def latent_models(draw):
    """Models of any sizes, in which it may never pay to attend directly."""
    size = st.integers(1, 64)
    return latent_model(
        vocab_size=draw(st.integers(2, 1000)),
        hidden_size=8 * draw(size),
        intermediate_size=8 * draw(size),
        q_lora_rank=draw(st.none() | size),
        kv_lora_rank=draw(size),
        qk_nope_head_dim=draw(size),
        qk_rope_head_dim=2 * draw(size),
        v_head_dim=draw(size),
        moe_intermediate_size=8 * draw(size),
        num_experts_per_tok=draw(st.integers(1, 4)),
        n_shared_experts=draw(st.integers(0, 2)),
        first_k_dense_replace=draw(st.integers(0, 2)),
    )


@given(
    model=latent_models(),
    system=st.sampled_from(["cpu", "h100"]),
    layout=st.sampled_from([Layout(), Layout(kvp=2), Layout(kvp=4, tpa=2)]),
    counts=st.tuples(st.integers(0, 300), st.integers(0, 10**6), st.integers(1, 9000), st.integers(0, 10**6)),
    parts=st.sampled_from([1, 2, 8]),
)
def test_the_compiled_cost_of_any_model_is_that_of_arrays_to_the_bit(model, system, layout, counts, parts):
    decodes, context, rows, prefix = counts
    how = Setting(model, load_system(system), Dtypes("bfloat16", "bfloat16"))
    work = (Work.decode(decodes, context) + Work.chunk(rows, prefix))._replace(parts=parts)
    assert StepCost(how, layout).seconds(work) == step_seconds(how, Layouts.of([layout], hop_b=False), work)[0]


def test_a_model_whose_chunks_never_attend_directly_has_a_cost():
    """2 x kv_lora_rank is at most qk_nope_head_dim + v_head_dim."""
    sizes = {"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    model = latent_model(hidden_size=16, intermediate_size=16, moe_intermediate_size=16, **sizes)
    assert latents_of(model).direct_rows == math.inf
    how = Setting(model, load_system("cpu"), Dtypes("bfloat16", "bfloat16"))
    assert math.isfinite(StepCost(how, Layout()).seconds(Work.chunk(512, 0)))
