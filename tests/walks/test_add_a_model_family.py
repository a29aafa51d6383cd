"""A newcomer's walk: a model family is one module in spec/families.

A new kind of weight is declared in spec/weights.py, and a layer of compute/models uses it.
"""

from dataclasses import replace

import pytest

from longhelix.compute.models.parameters import check, declare
from longhelix.spec import FAMILIES, read_hf_config
from longhelix.spec.config_parts import alike, dense, grouped_query
from longhelix.spec.family import DECODER, Family
from longhelix.spec.layout import Layout
from longhelix.spec.missing_parts import missing_parts
from longhelix.spec.weights import num_parameters
from toy_model import attention_of

pytestmark = pytest.mark.unit


def madeup_layers(config, rope):
    """Equal layers: attention with biases and normed heads, and a dense FFN."""
    return alike(config, grouped_query(config, rope, qkv_bias=True, qk_norm=True), dense(config))


def madeup_family():
    return Family(
        madeup_layers,
        defaults={**DECODER, "head_dim": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
        tensors={"input_layernorm.weight": "ln_1.weight", "mlp.up_proj.weight": "mlp.w_in.weight"},
    )


def test_a_family_with_other_names_and_norms_is_one_module(monkeypatch):
    monkeypatch.setitem(FAMILIES, "madeup", madeup_family())
    config = {"model_type": "madeup", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 24, "vocab_size": 30}
    spec = read_hf_config(config)
    assert (attention_of(spec).qkv_bias, attention_of(spec).qk_norm, attention_of(spec).head_size) == (True, True, 4)
    assert missing_parts(spec) == []
    qwen = replace(spec, architecture="qwen3")
    shapes = {source.name: source.shape for p in declare(qwen, Layout(), 0) for source in p.sources}
    for usual, own in madeup_family().tensors.items():
        for layer in range(2):
            shapes[f"model.layers.{layer}.{own}"] = shapes.pop(f"model.layers.{layer}.{usual}")
    check(spec, {name: (shape, "float32") for name, shape in shapes.items()}, quantised=False)
    assert [p.name for p in declare(spec, Layout(), 0)] == [p.name for p in declare(qwen, Layout(), 0)]
    assert num_parameters(spec) == num_parameters(qwen)
