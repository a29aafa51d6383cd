"""Metadata of GGUF files, as llama.cpp's converter writes them: they are the model that config.json would be."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anything import VALUES
from gguf_metadata import BY_FAMILY, YARN, metadata_of
from longhelix.errors import UserError
from longhelix.spec import FAMILIES, ModelSpec, read_gguf, read_hf_config
from longhelix.spec.gguf import GgufForm, GgufMetadata, dense_settings
from longhelix.spec.gguf_metadata import gguf_architectures, gguf_family
from longhelix.spec.gguf_names import model_parts

pytestmark = pytest.mark.unit

CONFIG = {
    "num_hidden_layers": 4, "max_position_embeddings": 4096, "hidden_size": 256, "num_attention_heads": 8,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_parameters": {"rope_theta": 1e6}, "vocab_size": 1000,
    "eos_token_id": 7, "dtype": "bfloat16", "tie_word_embeddings": False, "head_dim": 32,
}  # fmt: skip
_DENSE, _EXPERTS = (
    {"intermediate_size": 512},
    {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 96},
)
_LATENT = _DENSE | {
    "q_lora_rank": 64, "kv_lora_rank": 48, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "first_k_dense_replace": 1, "n_shared_experts": 2, "n_routed_experts": 16, "num_experts_per_tok": 4,
    "moe_intermediate_size": 96, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip
CONFIGS = {
    "llama": _DENSE,
    "mistral": _DENSE | {"sliding_window": 64},
    "mixtral": _DENSE | {"num_local_experts": 16, "num_experts_per_tok": 4},
    "qwen2": _DENSE,
    "qwen2_moe": _EXPERTS | {"shared_expert_intermediate_size": 128},
    "qwen3": _DENSE | {"head_dim": 64},
    "qwen3_moe": _EXPERTS | {"head_dim": 64, "norm_topk_prob": True},
    "deepseek_v2": _LATENT | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT,
}


def read(family: str, **changes: object) -> ModelSpec:
    return read_gguf(metadata_of(family, **changes), tensors=["lm_head.weight"])


def of_config(family: str, **changes: object) -> ModelSpec:
    return read_hf_config({"model_type": family} | CONFIG | CONFIGS[family] | changes)


@pytest.mark.parametrize("family", BY_FAMILY)
def test_metadata_are_the_model_of_the_config(family):
    assert read(family) == of_config(family)


def test_every_architecture_is_tested():
    assert {architecture for architecture, _ in BY_FAMILY.values()} == set(gguf_architectures())


def test_the_head_is_tied_if_there_is_none():
    assert read_gguf(metadata_of("qwen3")).vocabulary.tied_embeddings


def test_latents_of_files_before_the_split_projections():
    """Their key and value lengths are those of heads, and they have a key head for each query head."""
    old = {"attention.key_length": 40, "attention.value_length": 32, "attention.head_count_kv": 8}
    old |= {"attention.key_length_mla": None, "attention.value_length_mla": None}
    assert read("deepseek_v3", **old) == of_config("deepseek_v3")
    assert read("deepseek_v2", **old, expert_gating_func=None) == of_config("deepseek_v2")
    assert read("deepseek_v2", **{"attention.q_lora_rank": None}) == of_config("deepseek_v2", q_lora_rank=None)


def test_files_without_groups_of_experts_have_one():
    none = {"expert_group_count": None, "expert_group_used_count": None}
    assert read("deepseek_v3", **none) == of_config("deepseek_v3", n_group=1, topk_group=1)
    assert read("deepseek_v2", **none) == of_config("deepseek_v2", topk_method="greedy")


def test_yarn_of_latents_scales_scores_alone():
    scaling = {f"rope.scaling.{name}": value for name, value in YARN.items()}
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024}
    rope |= {"beta_fast": 16.0, "beta_slow": 2.0}
    assert read("qwen3", **scaling) == of_config("qwen3", rope_parameters=rope)
    found = read("deepseek_v3", **scaling, **{"rope.scaling.yarn_log_multiplier": 0.05})
    assert found == of_config("deepseek_v3", rope_parameters=rope | {"mscale": 0.5, "mscale_all_dim": 0.5})
    assert found.attentions[0].rope.scaling.attention_factor == 1
    with pytest.raises(UserError, match="'yarn_log_multiplier'"):
        read("qwen3", **scaling, **{"rope.scaling.yarn_log_multiplier": 0.05})
    assert read("qwen3", **scaling, **{"rope.scaling.yarn_ext_factor": 1.0}) == read("qwen3", **scaling)


def test_layers_that_predict_further_tokens_are_not_layers():
    assert read("deepseek_v3", block_count=5, nextn_predict_layers=1) == of_config("deepseek_v3")


def test_sizes_of_experts_in_old_files():
    old = {"expert_feed_forward_length": None, "expert_shared_feed_forward_length": None, "feed_forward_length": 384}
    expected = {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 384}
    assert read("qwen2_moe", **old) == of_config("qwen2_moe", **expected)


def test_biases_of_llama_are_found_among_the_tensors():
    tensors = ["lm_head.weight", "model.layers.0.self_attn.q_proj.bias", "model.layers.0.mlp.gate_proj.bias"]
    found = read_gguf(metadata_of("llama"), tensors=tensors)
    assert found == of_config("llama", attention_bias=True, mlp_bias=True)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("qwen3", "attention.causal", False),
        ("deepseek_v3", "attention.temperature_scale", 0.1),
        ("deepseek_v2", "expert_weights_norm", True),
        ("deepseek_v2", "expert_gating_func", 3),
    ],
)
def test_what_is_not_supported_is_refused_by_name(family, key, value):
    with pytest.raises(UserError, match=rf"{key} in the GGUF file is {value}: longhelix supports only"):
        read(family, **{key: value})


@pytest.mark.parametrize("family", BY_FAMILY)
def test_missing_keys_are_refused_by_name(family):
    optional = {"head_count_kv", "freq_base", "sliding_window", "expert_count", "q_lora_rank", "key_length"}
    optional |= {
        "value_length",
        "key_length_mla",
        "leading_dense_block_count",
        "expert_shared_count",
        "expert_group_count",
    }
    optional |= {"expert_group_used_count", "expert_weights_scale", "expert_gating_func", "expert_weights_norm"}
    architecture, keys = BY_FAMILY[family]
    for key in keys:
        if key.rpartition(".")[2] not in optional and not (key == "rope.dimension_count" and family == "llama"):
            with pytest.raises(UserError, match=f"no metadata key '{architecture}.{key}'") as caught:
                read(family, **{key: None})
            assert caught.value.code == "invalid_model"


@pytest.mark.parametrize("architecture", ["gpt2", 7, None, ["llama"]])
def test_other_architectures_are_refused_with_the_known_ones(architecture):
    with pytest.raises(UserError, match="longhelix reads GGUF files of deepseek2, llama, qwen2, ") as caught:
        read_gguf(metadata_of("llama") | {"general.architecture": architecture})
    assert caught.value.code == "unknown_architecture"


@pytest.mark.parametrize("family", BY_FAMILY)
@given(data=st.data())
def test_any_value_is_read_or_refused_in_a_sentence(family, data):
    scaling = {f"rope.scaling.{name}": value for name, value in YARN.items()}
    more = {"nextn_predict_layers": 1, "attention.causal": True, "rope.scaling.yarn_log_multiplier": 0.1}
    sound = metadata_of(family, **data.draw(st.sampled_from([{}, scaling, more | scaling])))
    key = data.draw(st.sampled_from(sorted(sound)))
    message = None
    try:
        spec = read_gguf(sound | {key: data.draw(VALUES)})
    except UserError as error:
        message = str(error)
    if message is None:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ModelSpec) == spec
    else:
        assert "\n" not in message
        assert 10 < len(message.encode()) < 400


def test_a_family_says_in_its_module_what_its_files_are_called(monkeypatch):
    """Another architecture needs no change elsewhere."""
    form = GgufForm("madeup", dense_settings, modules={"ffn_in": "mlp.w_in"}, interleaved=frozenset({"attn_q"}))
    family = replace(FAMILIES["qwen3"], gguf=form, tensors={"mlp.w_in.weight": "mlp.up.weight"})
    monkeypatch.setitem(FAMILIES, "madeup", family)
    keys = {f"madeup.{name}": value for name, value in BY_FAMILY["qwen3"][1].items()}
    metadata = {"general.architecture": "madeup"} | keys
    assert gguf_family(GgufMetadata(metadata))[0] == "madeup"
    assert replace(read_gguf(metadata), architecture="qwen3") == read_gguf(metadata_of("qwen3", eos_token_id=None) | {
        "tokenizer.ggml.eos_token_id": None
    })  # fmt: skip
    (up,), (query,) = (model_parts(f"blk.3.{name}.weight", form, family) for name in ("ffn_in", "attn_q"))
    assert (up.name, up.is_interleaved) == ("model.layers.3.mlp.up.weight", False)
    assert (query.name, query.is_interleaved) == ("model.layers.3.self_attn.q_proj.weight", True)


@pytest.mark.parametrize(
    ("family", "stored", "expected"),
    [
        ("qwen2_moe", "blk.1.ffn_gate_inp_shexp.weight", ["model.layers.1.mlp.shared_expert_gate.weight"]),
        ("qwen2_moe", "blk.1.ffn_up_shexp.weight", ["model.layers.1.mlp.shared_expert.up_proj.weight"]),
        ("qwen3_moe", "blk.0.ffn_down_exps.weight", ["model.layers.0.mlp.experts.{}.down_proj.weight"]),
        ("mixtral", "blk.0.ffn_down_exps.weight", ["model.layers.0.block_sparse_moe.experts.{}.w2.weight"]),
        (
            "qwen3_moe",
            "blk.0.ffn_gate_up_exps.weight",
            [f"model.layers.0.mlp.experts.{{}}.{side}_proj.weight" for side in ("gate", "up")],
        ),
        ("deepseek_v3", "blk.9.exp_probs_b.bias", ["model.layers.9.mlp.gate.e_score_correction_bias"]),
        ("deepseek_v3", "blk.9.attn_k_b.weight", ["model.layers.9.self_attn.kv_b_proj.weight"]),
        ("deepseek_v3", "blk.9.nextn.eh_proj.weight", ["model.layers.9.eh_proj.weight"]),
        ("qwen2", "blk.1.attn_q.bias", ["model.layers.1.self_attn.q_proj.bias"]),
        ("llama", "output_norm.weight", ["model.norm.weight"]),
        ("llama", "blk.0.ffn_gate.3.weight", []),
        ("llama", "blk.0.output.weight", []),
        ("llama", "token_embd.weight\n", []),
    ],
)
def test_names_of_tensors(family, stored, expected):
    form = FAMILIES[family].gguf
    assert [part.name for part in model_parts(stored, form, FAMILIES[family])] == expected
