"""Families that the engine does not run yet: read as transformers defines them, for the planner."""

import json
from dataclasses import replace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    DeepseekV32Config,
    Glm4MoeConfig,
    GptOssConfig,
    Llama4TextConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3NextConfig,
)

from anything import VALUES
from longhelix.errors import UserError
from longhelix.spec import FAMILIES, Activation, Indexer, LinearAttention, ModelSpec, MoE, Routing, read_hf_config
from longhelix.spec.missing_parts import missing_parts
from longhelix.spec.model import CheckpointFormat
from longhelix.spec.presets import load_model
from longhelix.spec.weights import num_parameters
from toy_model import attention_of, limit_of, moe_of

pytestmark = pytest.mark.unit

SIZES = {
    "hidden_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "intermediate_size": 40,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "num_experts_per_tok": 2,
}
GLM = {
    "intermediate_size": 200,
    "moe_intermediate_size": 40,
    "n_routed_experts": 5,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
LATENT = GLM | {
    "num_key_value_heads": 6,
    "n_routed_experts": 6,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "index_n_heads": 4,
    "index_head_dim": 10,
    "index_topk": 32,
}
NEXT = {
    "head_dim": 24,
    "num_experts": 5,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 3,
}
CONFIGS = {
    "deepseek_v32": (DeepseekV32Config, LATENT),
    "qwen3_next": (Qwen3NextConfig, NEXT),
    "glm4_moe": (Glm4MoeConfig, GLM),
    "gpt_oss": (GptOssConfig, {"num_local_experts": 5}),
    "llama4_text": (Llama4TextConfig, {"num_local_experts": 5, "intermediate_size_mlp": 200}),
}


def made(family, **changes):
    config, sizes = CONFIGS[family]
    return config(**SIZES | sizes | changes)


def planned(family, **changes) -> ModelSpec:
    return read(made(family, **changes).to_dict())


def read(config) -> ModelSpec:
    return read_hf_config(config)


def refused(config, *words) -> None:
    with pytest.raises(UserError) as caught:
        read_hf_config(config)
    for word in words:
        assert word in str(caught.value)


def full_layers(spec) -> list[int]:
    return [layer for layer in range(spec.num_layers) if spec.view_of(layer) is None]


def assert_sentence(error) -> None:
    assert 10 < len(str(error).encode()) < 500


MISSING = {
    "deepseek_v32": ["an indexer (DeepSeek sparse attention)"],
    "qwen3_next": [
        "linear attention (Gated DeltaNet)",
        "a gate of attention outputs",
    ],
    "glm4_moe": [],
    "gpt_oss": ["attention sinks", "experts with biases"],
    "llama4_text": [
        "L2 norms of queries and keys",
        "a temperature that depends on positions",
        "experts with weighted inputs",
    ],
}


@pytest.mark.parametrize("family", CONFIGS)
def test_the_parts_that_the_engine_lacks_are_named(family):
    assert missing_parts(planned(family)) == MISSING[family]


def test_an_unknown_family_is_refused_with_the_known_ones():
    refused({"model_type": "gpt2"}, "'gpt2'", "longhelix knows ", *FAMILIES)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("glm4_moe", {}),
        ("glm4_moe", {"attention_bias": True, "use_qk_norm": True}),
        ("gpt_oss", {}),
        ("gpt_oss", {"attention_bias": False}),
        ("llama4_text", {}),
        ("llama4_text", {"interleave_moe_layer_step": 2}),
        ("llama4_text", {"interleave_moe_layer_step": 2, "attention_bias": True}),
        ("deepseek_v32", {}),
        ("deepseek_v32", {"attention_bias": True}),
        ("qwen3_next", {}),
        ("qwen3_next", {"attention_bias": True, "full_attention_interval": 3}),
    ],
)
def test_parameters_are_those_of_transformers(family, changes):
    config = made(family, **changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    routing_biases = sum(buffer.numel() for name, buffer in model.named_buffers() if "correction_bias" in name)
    assert num_parameters(read(config.to_dict())) == sum(map(torch.numel, model.parameters())) + routing_biases


def test_what_chooses_tokens_and_linear_attention_are_those_of_the_config():
    indexers = {family: attention_of(planned(family)).visibility.indexer for family in CONFIGS}
    assert indexers.pop("deepseek_v32") == Indexer(num_heads=4, head_size=10, chosen_tokens=32)
    assert not any(indexers.values())
    linear = LinearAttention(num_key_heads=2, num_value_heads=6, key_size=12, value_size=14, kernel_size=3)
    assert planned("qwen3_next").layers[0].linear == linear
    assert all(layer.linear is None for family in CONFIGS.keys() - {"qwen3_next"} for layer in planned(family).layers)


@pytest.mark.parametrize("changes", [{}, {"layer_types": ["full_attention"] * 2 + ["linear_attention"] * 4}])
def test_linear_layers_are_those_that_transformers_says(changes):
    config = made("qwen3_next", **changes)
    whole = config.to_dict()
    spec = read(whole)
    linear = [kind == "linear_attention" for kind in config.layer_types]
    assert [layer.linear is not None for layer in spec.layers] == linear
    assert not spec.views
    if not changes:
        assert read({key: whole[key] for key in whole if key != "layer_types"}) == spec


def test_experts_are_those_of_the_config():
    assert moe_of(planned("deepseek_v32")) == MoE(
        6, 2, 40, shared_size=80, routing=Routing(bias=True, sigmoid=True, num_groups=2, scale=2.5)
    )
    assert moe_of(planned("qwen3_next")) == MoE(5, 2, 40, shared_size=56, routing=Routing(shared_gate=True))
    assert moe_of(planned("glm4_moe")) == MoE(5, 2, 40, shared_size=80, routing=Routing(bias=True, sigmoid=True))
    assert moe_of(planned("gpt_oss")) == MoE(5, 2, 40, biases=True, activation=Activation("clamped_swiglu"))
    assert moe_of(planned("llama4_text", interleave_moe_layer_step=3)) == MoE(
        5, 2, 40, shared_size=40, routing=Routing(sigmoid=True, normalised=False, weighted_inputs=True)
    )


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_llama_4_has_experts_in_the_layers_that_transformers_says(step):
    config = made("llama4_text", interleave_moe_layer_step=step)
    spec = read(config.to_dict())
    assert [layer for layer in range(6) if spec.layers[layer].moe is not None] == config.moe_layers


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt_oss", {}),
        ("gpt_oss", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 4}),
        ("llama4_text", {}),
        ("llama4_text", {"no_rope_layers": [1, 0, 0, 1, 1, 0]}),
        ("llama4_text", {"no_rope_layer_interval": 2}),
    ],
)
def test_windows_are_in_the_layers_that_transformers_says(family, changes):
    config = made(family, **changes)
    spec = read(config.to_dict())
    windowed = [kind != "full_attention" for kind in config.layer_types]
    assert list(map(bool, spec.groups)) == windowed


@pytest.mark.parametrize(("family", "key"), [("gpt_oss", "sliding_window"), ("llama4_text", "attention_chunk_size")])
def test_a_windows_size_is_the_configs_or_the_familys(family, key):
    assert limit_of(planned(family, **{key: 33})) == 33
    config = made(family).to_dict()
    assert limit_of(read({name: value for name, value in config.items() if name != key})) == config[key]
    assert limit_of(read(config | {key: None})) is None
    assert not any(read(config | {key: None}).groups)


def test_a_config_that_says_nothing_of_layers_has_the_familys_pattern():
    for family in ("gpt_oss", "llama4_text"):
        config = made(family).to_dict()
        short = {name: config[name] for name in config if name not in ("layer_types", "no_rope_layers", "moe_layers")}
        assert read(short) == read(config)


def test_layers_of_families_that_run_have_windows_where_layer_types_says_so():
    config = {"model_type": "qwen3", "sliding_window": 512, "use_sliding_window": True} | SIZES
    assert all(read_hf_config(config | {"max_window_layers": 0}).groups)
    kinds = ["sliding_attention", "attention", "sliding_attention", *["full_attention"] * 3]
    assert full_layers(read_hf_config(config | {"layer_types": kinds})) == [1, 3, 4, 5]
    for change in ({"sliding_window": None}, {"use_sliding_window": False}):
        refused(config | change | {"layer_types": kinds}, "sliding_attention in layer_types, but no window")
    refused(config | {"layer_types": kinds[:5]}, "a list of 6 names")
    refused(config | {"layer_types": ["chunked_attention", *kinds[1:]]}, "full_attention or sliding_attention")
    # transformers does not read layer_types of these.
    for family, change in (("mistral", {}), ("qwen3_moe", {"num_experts": 5, "moe_intermediate_size": 40})):
        spec = read_hf_config(config | change | {"model_type": family, "layer_types": kinds})
        assert all(spec.groups)


@pytest.mark.parametrize("config", [Qwen2Config, Qwen3Config])
def test_qwens_first_layers_have_no_window(config):
    settings = SIZES | {"use_sliding_window": True, "sliding_window": 512}
    for changes in ({"max_window_layers": 2}, {"num_hidden_layers": 30}):
        made = config(**settings | changes)
        whole = made.to_dict()
        old = {key: value for key, value in whole.items() if key != "layer_types"}
        for spec in map(read_hf_config, (whole, old)):
            windowed = [kind == "sliding_attention" for kind in made.layer_types]
            assert list(map(bool, spec.groups)) == windowed
    refused(SIZES | {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": -1}, "max_window_layers")


def test_llama_4s_whole_config_is_read_for_its_decoder():
    text = made("llama4_text").to_dict()
    whole = {
        "model_type": "llama4",
        "text_config": text,
        "vision_config": {"hidden_size": 7},
        "torch_dtype": "bfloat16",
    }
    assert read(whole) == replace(read(text), architecture="llama4", checkpoint=CheckpointFormat("bfloat16"))
    refused({"model_type": "llama4"}, "no text_config")


def test_a_part_of_a_head_is_rotated():
    config = made("glm4_moe").to_dict()
    assert config["rope_parameters"]["partial_rotary_factor"] == 0.5
    (attention,) = read(config).attentions
    assert attention.rotation == (attention.rope, attention.head_size // 2)
    assert read(config | {"rope_parameters": {"rope_theta": 10_000.0}}).attentions == (attention,)


def test_layers_without_positions_rotate_nothing():
    spec = planned("llama4_text", no_rope_layers=[1, 0, 1, 0], num_hidden_layers=4)
    size = attention_of(spec).head_size
    assert [spec.rotations[spec.rotation_of(layer)].size for layer in range(4)] == [size, 0, size, 0]


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama4_text", {"moe_layers": [0, 1]}),
        ("llama4_text", {"no_rope_layers": [2]}),
        ("llama4_text", {"no_rope_layers": "1"}),
        ("llama4_text", {"attention_chunk_size": 0}),
        ("llama4_text", {"interleave_moe_layer_step": 0}),
        ("llama4_text", {"intermediate_size_mlp": None}),
        ("gpt_oss", {"num_local_experts": None}),
        ("gpt_oss", {"layer_types": [1]}),
        ("glm4_moe", {"use_qk_norm": 1}),
        ("deepseek_v32", {"index_topk": 0}),
        ("deepseek_v32", {"index_head_dim": None}),
        ("deepseek_v32", {"q_lora_rank": None}),
        ("qwen3_next", {"linear_num_key_heads": 4}),
        ("qwen3_next", {"linear_conv_kernel_dim": "4"}),
        ("qwen3_next", {"layer_types": "linear_attention"}),
        ("qwen3_next", {"mlp_only_layers": [1]}),
    ],
)
def test_what_no_config_can_have_is_refused_by_name(family, change):
    config = made(family).to_dict() | change
    if "no_rope_layers" in change:  # which counts where layer_types is absent
        del config["layer_types"]
    refused(config, *change)


@pytest.mark.parametrize("family", CONFIGS)
@given(data=st.data())
def test_a_config_with_any_value_is_read_or_refused_in_a_sentence(family, data):
    config = made(family).to_dict()
    key, value = data.draw(st.sampled_from(sorted(config))), data.draw(VALUES)
    try:
        spec = read(config | {key: value})
    except UserError as error:
        assert_sentence(error)
        return
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ModelSpec) == spec


def test_presets_are_read_from_folders_as_they_are_by_name(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(made("gpt_oss").to_dict()))
    assert load_model(str(tmp_path)) == planned("gpt_oss")
