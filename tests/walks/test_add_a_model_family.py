"""A newcomer's walk: a model family is an entry of spec/family.py. A new kind of weight is declared in spec/weights.py,
and used by a layer of models/."""

from dataclasses import replace

import pytest

from longhelix.compute.models.parameters import check, declare
from longhelix.spec import ModelSpec
from longhelix.spec import family as families
from longhelix.spec.family import DECODER, Family
from longhelix.spec.layout import Layout
from longhelix.spec.weights import num_parameters

pytestmark = pytest.mark.unit


def test_a_family_with_other_names_and_norms_is_one_entry(monkeypatch):
    """Made up: biased queries, normed heads, and tensors of its own names."""
    tensors = {"input_layernorm.weight": "ln_1.weight", "mlp.up_proj.weight": "mlp.w_in.weight"}
    defaults = {**DECODER, "head_dim": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    madeup = Family(defaults, qkv_bias=True, qk_norm=True, tensors=tensors)
    monkeypatch.setitem(families.FAMILIES, "madeup", madeup)
    config = {"model_type": "madeup", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 24, "vocab_size": 30}
    spec = ModelSpec.from_hf_config(config)
    assert (spec.qkv_bias, spec.qk_norm, spec.head_size) == (True, True, 4)
    qwen = replace(spec, architecture="qwen3")
    shapes = {source.name: source.shape for p in declare(qwen, Layout(), 0) for source in p.sources}
    for usual, own in tensors.items():
        for layer in range(2):
            shapes[f"model.layers.{layer}.{own}"] = shapes.pop(f"model.layers.{layer}.{usual}")
    check(spec, {name: (shape, "float32") for name, shape in shapes.items()}, quantised=False)
    assert [p.name for p in declare(spec, Layout(), 0)] == [p.name for p in declare(qwen, Layout(), 0)]
    assert num_parameters(spec) == num_parameters(qwen)
