"""Gemma's configs as published: most of their fields are left out."""

import pytest

from longhelix.spec import Activation, Norms, Scores, Visibility, read_hf_config
from longhelix.spec.layout import HeadShape
from longhelix.spec.missing_parts import missing_parts
from longhelix.spec.vocabulary import Multipliers
from longhelix.spec.weights import num_parameters

pytestmark = pytest.mark.unit

# Of gemma-3-4b.
TEXT = {
    "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
}  # fmt: skip


def test_the_text_of_a_model_with_a_vision_tower():
    spec = read_hf_config({"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": TEXT, "vision_config": {}})
    text = read_hf_config(TEXT | {"torch_dtype": "bfloat16"})
    assert (spec.layers, spec.vocabulary) == (text.layers, text.vocabulary)
    assert spec.vocabulary.tied_embeddings
    assert spec.vision is None
    assert num_parameters(spec) == 3_880_263_168
    assert missing_parts(spec) == []


def test_each_sixth_layer_of_gemma_3_sees_everything_and_has_another_rotation():
    spec = read_hf_config(TEXT)
    local, full = spec.layers[0].attention, spec.layers[5].attention
    assert [layer.attention == full for layer in spec.layers] == [index % 6 == 5 for index in range(34)]
    assert (local.visibility, full.visibility) == (Visibility(window_tokens=1024), Visibility())
    assert (local.rope.scaling.kind, local.rope.theta) == ("default", 10_000.0)
    assert (full.rope.scaling.kind, full.rope.theta, full.rope.scaling.factor) == ("linear", 1_000_000.0, 8.0)
    assert full.heads == HeadShape(8, 4)
    assert spec.layers[0].dense.activation == Activation("gelu_tanh")
    assert spec.layers[0].norms == Norms(after=True, plus_one=True)
    assert spec.vocabulary.multipliers == Multipliers(embedding=2560**0.5, rounded=True)


def test_a_rope_scaling_option_changes_layers_that_see_everything():
    yarn = {"rope_type": "yarn", "factor": 2.0}
    for config in (TEXT, TEXT | {"rope_scaling": None, "rope_parameters": {"full_attention": {"rope_theta": 5e5}}}):
        plain, scaled = read_hf_config(config), read_hf_config(config, rope_scaling=yarn)
        theta = plain.layers[5].attention.rope.theta
        assert (scaled.layers[5].attention.rope.scaling.kind, scaled.layers[5].attention.rope.theta) == ("yarn", theta)
        assert scaled.layers[0] == plain.layers[0]


def test_gemma_2_caps_scores_and_logits():
    sizes = {"hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
    spec = read_hf_config({"model_type": "gemma2", "vocab_size": 256000, "num_attention_heads": 8} | sizes)
    assert {layer.attention.scores for layer in spec.layers} == {Scores(scale=256**-0.5, cap=50.0)}
    assert spec.vocabulary.multipliers.logit_cap == 30.0
    assert [layer.attention.visibility.window_tokens for layer in spec.layers[:3]] == [4096, None, 4096]
    assert num_parameters(spec) == 2_614_341_888
