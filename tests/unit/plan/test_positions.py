"""Contexts that are longer than a model supports."""

import pytest

from longhelix.plan.positions import beyond_positions
from longhelix.spec import read_hf_config
from longhelix.spec.presets import load_model
from toy_model import attention_of

pytestmark = pytest.mark.unit

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 100,
    "max_position_embeddings": 40_960,
}


def positions(**rope) -> int:
    return read_hf_config(CONFIG | {"rope_scaling": rope or None}).scaled_positions


def test_a_context_of_all_positions_is_within_and_one_more_is_not():
    model = load_model("llama-3-8b")
    assert beyond_positions(model, 8192) is None
    said = beyond_positions(model, 8193)
    assert "8,193 tokens" in said
    assert "8,192 positions" in said


def test_yarn_takes_a_model_to_its_factor_times_the_original_positions():
    """As Qwen3's model card sets it: 4 times 32,768, beside max_position_embeddings of 40,960."""
    assert positions() == 40_960
    assert positions(rope_type="yarn", factor=4.0, original_max_position_embeddings=32_768) == 131_072
    assert positions(rope_type="yarn", factor=1.0, original_max_position_embeddings=32_768) == 40_960


@pytest.mark.parametrize("name", ["deepseek-r1", "kimi-k2", "gpt-oss-120b"])
def test_positions_that_count_the_scaling_already_are_not_scaled_again(name):
    model = load_model(name)
    assert attention_of(model).rope.scaling.kind == "yarn"
    assert model.scaled_positions == model.max_positions


def test_other_scalings_leave_the_positions_as_they_are():
    assert load_model("llama-3.1-405b").scaled_positions == 131_072
    assert positions(rope_type="linear", factor=8.0) == 40_960
