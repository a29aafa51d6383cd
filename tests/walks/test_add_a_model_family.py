"""A newcomer's walk: a model family is one module in spec/families.

A new kind of weight is declared in spec/weights.py, and a layer of compute/models uses it.
"""

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from float64_layers import logits_of, random_weights
from longhelix import LLM, SamplingParams
from longhelix.compute.models.parameters import check, declare
from longhelix.spec import FAMILIES, HeadNorms, Projections, Visibility, read_hf_config
from longhelix.spec.config import count
from longhelix.spec.config_parts import alike, all_but_each, dense, grouped_query, limited, num_layers, stack
from longhelix.spec.family import DECODER, ConfigFields, Family
from longhelix.spec.layout import Layout
from longhelix.spec.missing_parts import missing_parts
from longhelix.spec.weights import num_parameters
from toy_model import attention_of

WALKS = Path(__file__).parent
# The ranks are other processes. A module in spec/families would tell them of the family.
TELLING_RANKS = """
from longhelix.spec import FAMILIES
from test_add_a_model_family import windowed_family
FAMILIES["madeup"] = windowed_family()
"""


def madeup_layers(config, rope):
    """Equal layers: attention with biases and normed heads, and a dense FFN."""
    return alike(
        config,
        grouped_query(config, rope, projections=Projections(qkv_bias=True), norms=HeadNorms(qk=True)),
        dense(config),
    )


def madeup_family():
    return Family(
        madeup_layers,
        ConfigFields(defaults={**DECODER, "head_dim": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}),
        tensors={"input_layernorm.weight": "ln_1.weight", "mlp.up_proj.weight": "mlp.w_in.weight"},
    )


def windowed_layers(config, rope):
    """The same layers with a sliding window, which each third layer lacks."""
    attention = grouped_query(config, rope, projections=Projections(qkv_bias=True), norms=HeadNorms(qk=True))
    window = Visibility(window_tokens=count(config, "sliding_window"))
    return stack(limited(attention, window, all_but_each(config, 3)), [dense(config)] * num_layers(config))


def windowed_family():
    family = madeup_family()
    fields = replace(family.fields, defaults={**family.fields.defaults, "sliding_window": 40})
    return replace(family, layers=windowed_layers, fields=fields)


def with_own_names(tensors, layers):
    """Return a checkpoint's tensors with the family's names for them in place of the usual ones."""
    own = {
        f"model.layers.{layer}.{usual}": f"model.layers.{layer}.{name}"
        for layer in range(layers)
        for usual, name in madeup_family().tensors.items()
    }
    return {own.get(name, name): tensor for name, tensor in tensors.items()}


@pytest.mark.unit
def test_a_family_with_other_names_and_norms_is_one_module(monkeypatch):
    monkeypatch.setitem(FAMILIES, "madeup", madeup_family())
    config = {"model_type": "madeup", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"intermediate_size": 24, "vocab_size": 30}
    spec = read_hf_config(config)
    assert (attention_of(spec).projections.qkv_bias, attention_of(spec).norms.qk, attention_of(spec).head_size) == (
        True,
        True,
        4,
    )
    assert missing_parts(spec) == []
    qwen = replace(spec, architecture="qwen3")
    shapes = {source.name: source.shape for p in declare(qwen, Layout(), 0) for source in p.sources}
    shapes = with_own_names(shapes, layers=2)
    check(spec, {name: (shape, "float32") for name, shape in shapes.items()}, gguf=False)
    assert [p.name for p in declare(spec, Layout(), 0)] == [p.name for p in declare(qwen, Layout(), 0)]
    assert num_parameters(spec) == num_parameters(qwen)


@pytest.mark.dist
def test_its_tokens_are_those_of_float64(tmp_path, monkeypatch):
    """One prompt is longer than the window, and the other one is shorter."""
    from oracle import VOCAB, greedy_of, save_tokenizer_files  # takes seconds, and the ranks import this module

    monkeypatch.setitem(FAMILIES, "madeup", windowed_family())
    (tmp_path / "sitecustomize.py").write_text(TELLING_RANKS)
    paths = map(str, (tmp_path, WALKS, WALKS.parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]))
    config = {"model_type": "madeup", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config |= {"head_dim": 16, "intermediate_size": 80, "vocab_size": VOCAB, "max_position_embeddings": 256}
    spec, generator = read_hf_config(config), torch.Generator().manual_seed(0)
    assert [layer.attention.visibility.window_tokens for layer in spec.layers] == [40, 40, None]
    weights = random_weights(spec, generator)
    save_file(with_own_names(weights, spec.num_layers), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_tokenizer_files(tmp_path)
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in (150, 30)]
    settings = {"dtype": "float32", "device": "cpu", "block_tokens": 16, "max_model_len": 192}
    with LLM(tmp_path, Layout(kvp=2), **settings) as llm:
        results = llm.generate(prompts, SamplingParams(max_new_tokens=12, ignore_eos=True))
    logits = partial(logits_of, spec.layers, weights)
    assert [result.token_ids for result in results] == [greedy_of(logits, prompt, 12)[0] for prompt in prompts]
