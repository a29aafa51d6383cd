import json
import math
from dataclasses import FrozenInstanceError, replace

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from anything import VALUES
from longhelix.compute.models.parameters import declare
from longhelix.errors import UserError
from longhelix.spec import (
    FAMILIES,
    FORMATS,
    MLA,
    ROPE_KINDS,
    WEIGHT_DTYPES,
    ModelSpec,
    MoE,
    Projections,
    RopeSpec,
    Routing,
    Visibility,
    read_gguf,
    read_hf_config,
)
from longhelix.spec.config_fields import NEUTRAL, OPTIONAL, REQUIRED, WINDOW
from longhelix.spec.layout import Layout
from longhelix.spec.rope import RopeScaling
from longhelix.spec.weights import num_parameters
from toy_model import attention_of, kv_elements, latents_of, limit_of, moe_of, toy_model

pytestmark = pytest.mark.unit

CONFIGS = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
SIZES = {
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 200,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 2e-5,
}
EXPERTS = {"moe_intermediate_size": 40, "num_experts_per_tok": 2}
LATENTS = {
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 5,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
# The sizes that no default of transformers would give.
PLANNED = {
    "mixtral": (MixtralConfig, {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2_moe": (Qwen2MoeConfig, EXPERTS | {"num_experts": 5, "shared_expert_intermediate_size": 70}),
    "qwen3_moe": (Qwen3MoeConfig, EXPERTS | {"num_experts": 5, "head_dim": 20}),
    "deepseek_v2": (DeepseekV2Config, EXPERTS | LATENTS),
    "deepseek_v3": (DeepseekV3Config, EXPERTS | LATENTS | {"n_group": 1, "topk_group": 1}),
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 1024},
    "yarn": YARN,
    "longrope": LONGROPE | {"original_max_position_embeddings": 1024},
}
MINIMAL = {"model_type": "llama", "num_hidden_layers": 3} | {
    key: SIZES[key]
    for key in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "max_position_embeddings")
}
GGUF = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.embedding_length": 576,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
    "llama.feed_forward_length": 1536,
    "llama.context_length": 8192,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 100_000.0,
    "llama.rope.dimension_count": 64,
    "llama.vocab_size": 49_152,
    "tokenizer.ggml.eos_token_id": 2,
}


def read(config, **changes) -> ModelSpec:
    return read_hf_config(config | changes)


def rope_of(rope, **changes) -> RopeSpec:
    return attention_of(read(MINIMAL, rope_parameters=rope, **changes)).rope


def refused(config, *words: str, code: str = "invalid_model") -> None:
    with pytest.raises(UserError) as caught:
        read_hf_config(config)
    assert caught.value.code == code
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("family", CONFIGS)
def test_sizes_are_those_of_transformers(family):
    config = CONFIGS[family](**SIZES, tie_word_embeddings=True, eos_token_id=[7, 9], dtype="bfloat16")
    spec = read_hf_config(config.to_dict())
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert spec == toy_model(
        family,
        num_layers=3,
        hidden_size=96,
        num_query_heads=6,
        num_kv_heads=2,
        head_size=head_size,
        ffn_size=200,
        vocab_size=1000,
        max_positions=4096,
        rms_norm_eps=2e-5,
        rope=RopeSpec(theta=10_000.0, scaling=RopeScaling(original_max_positions=4096)),
        dtype="bfloat16",
        tied_embeddings=True,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        visibility=Visibility(window_tokens=4096 if family == "mistral" else None),
        eos_token_ids=(7, 9),
    )
    assert head_size == (128 if family == "qwen3" else 16)


@pytest.mark.parametrize("family", CONFIGS)
def test_a_default_config_is_read_and_json_makes_no_difference(family):
    config = CONFIGS[family]()
    spec = read_hf_config(config.to_dict())
    assert (spec.architecture, spec.checkpoint.dtype) == (family, "float32")
    for use_diff in (True, False):
        assert read_hf_config(json.loads(config.to_json_string(use_diff=use_diff))) == spec


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("family", CONFIGS)
def test_both_forms_of_rope_settings_read_alike(family, kind):
    scaling = {"head_dim": 16} if family == "qwen3" else {}
    config = CONFIGS[family](**SIZES, **scaling, rope_parameters=SCALINGS[kind] | {"rope_theta": 500_000.0})
    new = config.to_dict()
    assert new["rope_parameters"]["rope_theta"] == 500_000.0
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    older = {"type" if key == "rope_type" else key: value for key, value in SCALINGS[kind].items()}
    spec = read_hf_config(new)
    assert (attention_of(spec).rope.scaling.kind, attention_of(spec).rope.theta) == (kind, 500_000.0)
    assert read(old, rope_theta=500_000.0, rope_scaling=SCALINGS[kind]) == spec
    assert read(old, rope_theta=500_000.0, rope_scaling=older) == spec
    assert read_hf_config(json.loads(json.dumps(new))) == spec


def test_old_style_theta_alone_is_the_default_rope():
    assert attention_of(read(MINIMAL, rope_theta=500_000, rope_scaling=None)).rope == RopeSpec(
        theta=500_000.0, scaling=RopeScaling(original_max_positions=4096)
    )
    assert attention_of(read(MINIMAL)).rope.theta == 10_000.0


def test_original_positions_beside_the_rope_settings_count():
    rope = rope_of(LONGROPE, original_max_position_embeddings=512)
    assert rope.scaling.original_max_positions == 512
    assert rope.scaling.factor == 8.0
    assert rope.scaling.attention_factor == math.sqrt(1 + math.log(8) / math.log(512))
    both = rope_of(LONGROPE | {"original_max_position_embeddings": 1024}, original_max_position_embeddings=512)
    assert both == rope


def test_theta_in_the_rope_settings_goes_before_one_beside_them():
    assert rope_of({"rope_type": "default", "rope_theta": 7.0}, rope_theta=9.0).theta == 7.0


@pytest.mark.parametrize("architecture", ["gpt2", "kimi_k25", None])
def test_an_unknown_architecture_is_refused_with_the_known_ones(architecture):
    refused(
        MINIMAL | {"model_type": architecture},
        repr(architecture),
        *FAMILIES,
        code="unknown_architecture",
    )


def test_an_unknown_rope_type_is_refused_with_the_known_ones():
    refused(MINIMAL | {"rope_scaling": {"type": "su", "factor": 2}}, "'su'", *ROPE_KINDS, code="unknown_rope")


def test_an_unknown_rope_setting_is_refused():
    refused(MINIMAL | {"rope_scaling": YARN | {"beta_medium": 16}}, "'beta_medium'", code="invalid_argument")


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "longrope"])
def test_a_rope_type_without_what_it_needs_is_refused(kind):
    for key in set(SCALINGS[kind]) - {"rope_type", "original_max_position_embeddings"}:
        rope = {name: value for name, value in SCALINGS[kind].items() if name != key}
        refused(MINIMAL | {"rope_parameters": rope}, repr(kind), repr(key), code="invalid_argument")
        refused(MINIMAL | {"rope_parameters": rope | {key: None}}, repr(key), code="invalid_argument")


def test_longrope_factors_of_the_wrong_length_are_refused():
    for key in ("short_factor", "long_factor"):
        rope = LONGROPE | {key: [1.0] * 7}
        refused(MINIMAL | {"rope_parameters": rope}, key, "a list of 8 numbers", code="invalid_argument")


@pytest.mark.parametrize("factor", [-1.0, -8, 0, "x", True, float("inf")])
def test_a_rope_factor_that_is_no_positive_number_is_refused(factor):
    refused(
        MINIMAL | {"rope_scaling": {"type": "linear", "factor": factor}},
        "from 0.001 to 1000000",
        code="invalid_argument",
    )


def test_llama3_needs_two_different_wavelengths():
    rope = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0}
    refused(MINIMAL | {"rope_parameters": rope}, "must be below high_freq_factor", code="invalid_argument")


def test_gguf_scaling_settings_that_would_be_dropped_are_refused():
    scaled = GGUF | {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    for metadata, divisors in ((scaled | {"llama.rope.scaling.attn_factor": 2.0}, ()), (scaled, [1.0] * 32)):
        with pytest.raises(UserError, match="combines rope scaling 'yarn'"):
            read_gguf(metadata, divisors)
    for key in ("rope.scaling.factor", "rope.scale_linear", "rope.scaling.attn_factor"):
        with pytest.raises(UserError, match="combines rope scaling 'none'"):
            read_gguf(GGUF | {"llama.rope.scaling.type": "none", f"llama.{key}": 4.0})


@pytest.mark.parametrize("place", ["top", "rope_parameters"])
def test_partial_rotary_is_refused(place):
    config = {"partial_rotary_factor": 0.5} if place == "top" else {"rope_parameters": {"partial_rotary_factor": 0.5}}
    refused(MINIMAL | config, "partial_rotary_factor", code="invalid_argument")
    assert read(MINIMAL, partial_rotary_factor=1.0) == read(MINIMAL)


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_pytorch_tanh"])
def test_another_activation_than_silu_is_refused(activation):
    refused(MINIMAL | {"hidden_act": activation}, repr(activation), "'silu'")


@pytest.mark.parametrize("dtype", ["float64", "int8", "float8_e4m3fn"])
def test_another_dtype_is_refused_with_those_that_run(dtype):
    refused(MINIMAL | {"torch_dtype": dtype}, repr(dtype), "float32, bfloat16, float16")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_is_read_under_both_names(key):
    assert read(MINIMAL, **{key: "float16"}).checkpoint.dtype == "float16"
    assert read(MINIMAL, **{key: "torch.bfloat16"}).checkpoint.dtype == "bfloat16"


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "num_attention_heads",
        "num_hidden_layers",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("value", [None, 0, -3, 2.5, "8", True])
def test_a_size_that_is_missing_or_no_count_is_refused(key, value):
    refused(MINIMAL | {key: value}, f"{key} in the model's settings is {value!r}: set it to a")
    if value is None and key != "max_position_embeddings":
        refused({name: size for name, size in MINIMAL.items() if name != key}, f"{key} in the model's settings is None")


def test_kv_heads_default_to_query_heads_for_llama_alone():
    assert attention_of(read(MINIMAL)).heads.num_kv_heads == 6
    for family in ("mistral", "qwen2", "qwen3"):
        refused(MINIMAL | {"model_type": family}, "num_key_value_heads")


def test_query_heads_that_form_no_groups_are_refused():
    refused(MINIMAL | {"num_key_value_heads": 4}, "6 query heads", "4 KV heads", "num_key_value_heads")


def test_an_odd_head_size_is_refused():
    refused(MINIMAL | {"head_dim": 15}, "head size 15 is odd")


def test_an_explicit_head_size_need_not_divide_the_hidden_size():
    assert attention_of(read(MINIMAL, head_dim=64)).head_size == 64
    assert attention_of(read(MINIMAL, head_dim=None)).head_size == 16


@pytest.mark.parametrize(
    ("architecture", "qkv", "output", "ffn"),
    [("llama", True, True, True), ("mistral", False, False, False), ("qwen2", True, False, False),
     ("qwen3", True, True, False)],
)  # fmt: skip
def test_biases_follow_the_architecture(architecture, qkv, output, ffn):
    spec = read(MINIMAL, model_type=architecture, num_key_value_heads=2, attention_bias=True, mlp_bias=True)
    assert attention_of(spec).projections == Projections(qkv_bias=qkv, output_bias=output)
    assert spec.layers[0].dense.bias == ffn


def test_mistrals_window_is_4096_where_the_key_is_absent_and_none_where_it_is_null():
    config = MINIMAL | {"model_type": "mistral", "num_key_value_heads": 2}
    assert limit_of(read(config)) == MistralConfig().sliding_window == 4096
    assert limit_of(read(config, sliding_window=None)) is None
    assert limit_of(read(config, sliding_window=512)) == 512


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwens_window_counts_only_where_it_is_used(family):
    config = MINIMAL | {"model_type": family, "num_key_value_heads": 2, "sliding_window": 512}
    assert limit_of(read(config)) is None
    assert limit_of(read(config, use_sliding_window=False)) is None
    assert limit_of(read(config, use_sliding_window=True)) is None  # max_window_layers is 28 where it is absent
    assert limit_of(read(config, use_sliding_window=True, max_window_layers=1)) == 512


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwens_window_is_recorded_where_a_layer_slides(family):
    settings = SIZES | {"use_sliding_window": True, "sliding_window": 512}
    some = CONFIGS[family](**settings, max_window_layers=2)
    assert some.layer_types == ["full_attention", "full_attention", "sliding_attention"]
    assert limit_of(read_hf_config(some.to_dict())) == 512
    none = CONFIGS[family](**settings, max_window_layers=3)
    assert limit_of(read_hf_config(none.to_dict())) is None


def test_a_family_without_a_window_refuses_one():
    """transformers' forward pass does not read it, but the cache of its generate does."""
    refused(MINIMAL | {"sliding_window": 512}, "sliding_window = 512", "set it to null")
    refused(MINIMAL | {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "layer_types")
    unused = {"sliding_window": 512, "use_sliding_window": False, "layer_types": ["full_attention"] * 3}
    assert read(MINIMAL, **unused) == read(MINIMAL, sliding_window=None) == read(MINIMAL)


def test_eos_ids_of_the_generation_config_win():
    config = MINIMAL | {"eos_token_id": 2}
    assert read_hf_config(config).vocabulary.eos_token_ids == (2,)
    assert read_hf_config(config, {"eos_token_id": [5, 6]}).vocabulary.eos_token_ids == (5, 6)
    assert read_hf_config(config, {"eos_token_id": 5}).vocabulary.eos_token_ids == (5,)
    assert read_hf_config(config, {"temperature": 0.6}).vocabulary.eos_token_ids == (2,)
    assert read_hf_config(config, {"eos_token_id": None}).vocabulary.eos_token_ids == (2,)
    assert read_hf_config(MINIMAL).vocabulary.eos_token_ids == (LlamaConfig().eos_token_id,)
    assert read_hf_config(MINIMAL | {"eos_token_id": None}).vocabulary.eos_token_ids == ()


def test_a_spec_is_frozen_and_checks_itself():
    spec = read(MINIMAL)
    with pytest.raises(FrozenInstanceError):
        spec.hidden_size = 4
    with pytest.raises(UserError, match="vocab_size is 0"):
        replace(spec, vocabulary=replace(spec.vocabulary, size=0))


def test_gguf_metadata_gives_the_built_in_models_shape():
    assert read_gguf(GGUF) == toy_model(
        num_layers=30,
        hidden_size=576,
        num_query_heads=9,
        num_kv_heads=3,
        head_size=64,
        ffn_size=1536,
        vocab_size=49_152,
        max_positions=8192,
        rms_norm_eps=1e-5,
        rope=RopeSpec(theta=100_000.0, scaling=RopeScaling(original_max_positions=8192)),
        dtype="bfloat16",
        tied_embeddings=True,
        eos_token_ids=(2,),
    )


def test_gguf_defaults_are_those_of_the_format():
    optional = (
        "llama.attention.head_count_kv",
        "llama.rope.freq_base",
        "llama.rope.dimension_count",
        "llama.vocab_size",
    )
    metadata = {key: value for key, value in GGUF.items() if key not in optional}
    spec = read_gguf(metadata | {"tokenizer.ggml.tokens": ["a", "b", "c"]}, tensors=["lm_head.weight"])
    assert (
        attention_of(spec).heads.num_kv_heads,
        attention_of(spec).rope.theta,
        spec.vocabulary.size,
        spec.vocabulary.tied_embeddings,
    ) == (9, 10_000.0, 3, False)
    assert attention_of(read_gguf(GGUF | {"llama.attention.key_length": 64})).head_size == 64


def test_gguf_rope_scaling_is_read():
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    rope = attention_of(read_gguf(GGUF | linear)).rope
    assert (rope.scaling.kind, rope.scaling.factor, rope.theta) == ("linear", 4.0, 100_000.0)
    yarn = linear | {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.original_context_length": 2048}
    rope = attention_of(read_gguf(GGUF | yarn)).rope
    assert (rope.scaling.kind, rope.scaling.factor, rope.scaling.original_max_positions) == ("yarn", 4.0, 2048)
    assert rope.scaling.attention_factor == 0.1 * math.log(4.0) + 1
    none = read_gguf(GGUF | {"llama.rope.scaling.type": "none"})
    assert none == read_gguf(GGUF)


@pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
def test_gguf_rope_scaling_without_a_type_is_linear(key):
    """As in llama.cpp, which reads the older key where the newer is not there."""
    metadata = {"llama.rope.scale_linear": 8.0, f"llama.{key}": 4.0}
    rope = attention_of(read_gguf(GGUF | metadata)).rope
    assert (rope.scaling.kind, rope.scaling.factor) == ("linear", 4.0)


def test_gguf_rope_divisors_are_kept_with_theta():
    divisors = [1.0] * 16 + [8.0] * 16
    rope = attention_of(read_gguf(GGUF, divisors)).rope
    assert rope == RopeSpec(theta=100_000.0, scaling=RopeScaling(original_max_positions=8192), divisors=tuple(divisors))


@pytest.mark.parametrize(
    "key",
    [
        "block_count",
        "embedding_length",
        "attention.head_count",
        "feed_forward_length",
        "context_length",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_a_missing_gguf_key_is_refused_by_name(key):
    metadata = {name: value for name, value in GGUF.items() if name != f"llama.{key}"}
    with pytest.raises(UserError, match=f"'llama.{key}'") as caught:
        read_gguf(metadata)
    assert caught.value.code == "invalid_model"


def test_a_gguf_file_that_rotates_part_of_a_head_is_refused():
    with pytest.raises(UserError, match="rotates only a part of each head"):
        read_gguf(GGUF | {"llama.rope.dimension_count": 32})


def test_an_unknown_gguf_rope_scaling_is_refused():
    with pytest.raises(UserError, match="'ntk' is not known") as caught:
        read_gguf(GGUF | {"llama.rope.scaling.type": "ntk"})
    assert caught.value.code == "unknown_rope"


def planned(architecture: str, **changes):
    family, sizes = PLANNED[architecture]
    return family(**SIZES | sizes | changes)


def planned_spec(architecture: str, **changes) -> ModelSpec:
    return read_hf_config(planned(architecture, **changes).to_dict())


def numbers_of(config) -> int:
    """Parameters and the routing's biases of transformers' own model, which keeps the latter as buffers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    buffers = (buffer.numel() for name, buffer in model.named_buffers() if "correction_bias" in name)
    return sum(parameter.numel() for parameter in model.parameters()) + sum(buffers)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        *((architecture, {}) for architecture in PLANNED),
        ("qwen2_moe", {"qkv_bias": False}),
        ("qwen3_moe", {"attention_bias": True}),
        ("deepseek_v2", {"q_lora_rank": None}),
        ("deepseek_v2", {"attention_bias": True, "mlp_bias": True}),
        ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
        ("deepseek_v3", {"first_k_dense_replace": 3}),
        ("deepseek_v3", {"first_k_dense_replace": 4}),
        ("deepseek_v3", {"first_k_dense_replace": 0, "attention_bias": True}),
    ],
)
def test_parameters_are_as_many_as_in_transformers_model(architecture, changes, tied):
    config = planned(architecture, tie_word_embeddings=tied, **changes)
    assert num_parameters(read_hf_config(config.to_dict())) == numbers_of(config)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("family", CONFIGS)
def test_parameters_are_as_many_as_the_engine_declares(family, biased):
    config = CONFIGS[family](**SIZES).to_dict() | {"attention_bias": biased, "mlp_bias": biased}
    spec = read_hf_config(config)
    assert num_parameters(spec) == sum(parameter.num_elements for parameter in declare(spec, Layout(), 0))
    assert (latents_of(spec), moe_of(spec), kv_elements(spec)) == (
        None,
        None,
        2 * 3 * 2 * attention_of(spec).head_size,
    )


def test_experts_are_read_by_architecture():
    assert moe_of(planned_spec("mixtral")) == MoE(5, 2, 200)
    assert moe_of(planned_spec("qwen2_moe")) == MoE(
        5, 2, 40, shared_size=70, routing=Routing(shared_gate=True, normalised=False)
    )
    assert moe_of(planned_spec("qwen3_moe")) == MoE(5, 2, 40, routing=Routing(normalised=False))
    assert moe_of(planned_spec("deepseek_v2")) == MoE(5, 2, 40, shared_size=80, routing=Routing(normalised=False))
    assert moe_of(planned_spec("deepseek_v3")) == MoE(
        5, 2, 40, shared_size=80, routing=Routing(bias=True, sigmoid=True, scale=2.5)
    )


@pytest.mark.parametrize("architecture", ["deepseek_v2", "deepseek_v3"])
def test_a_latent_is_one_kv_head_of_all_query_heads(architecture):
    spec = planned_spec(architecture)
    assert latents_of(spec) == MLA(q_lora_rank=24, kv_lora_rank=20, nope_size=12, rope_size=8, value_size=10)
    assert latents_of(spec).direct_rows == 20 * 22 / 18
    assert replace(latents_of(spec), kv_lora_rank=11).direct_rows == math.inf
    assert (
        attention_of(spec).heads.num_query_heads,
        attention_of(spec).heads.num_kv_heads,
        attention_of(spec).head_size,
    ) == (6, 1, 20)
    assert kv_elements(spec) == 3 * (20 + 8)


def test_deepseeks_rope_turns_the_rotated_part_of_a_head():
    scaling = LONGROPE | {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = planned("deepseek_v3").to_dict() | {"rope_parameters": None, "rope_scaling": scaling}
    assert attention_of(read_hf_config(config)).rope.scaling.longrope.long_factor == (2.0,) * 4


def test_kimi_k2_is_deepseek_v3_under_its_own_name():
    config = planned("deepseek_v3").to_dict()
    kimi = read_hf_config(config | {"model_type": "kimi_k2"})
    assert replace(kimi, architecture="deepseek_v3") == read_hf_config(config)


def test_what_a_model_leaves_out_is_none():
    config = planned("deepseek_v2").to_dict()
    plain = read_hf_config(config | {"n_shared_experts": None, "q_lora_rank": None})
    assert (moe_of(plain).shared_size, latents_of(plain).q_lora_rank) == (0, None)
    assert moe_of(read_hf_config(config | {"topk_method": "noaux_tc"})).routing.bias


@pytest.mark.parametrize(
    ("architecture", "changes", "words"),
    [
        ("qwen2_moe", {"decoder_sparse_step": 2}, ("decoder_sparse_step = 2", "experts in every layer")),
        ("qwen3_moe", {"mlp_only_layers": [0]}, ("mlp_only_layers = [0]",)),
        ("deepseek_v2", {"moe_layer_freq": 2}, ("moe_layer_freq = 2",)),
        ("mixtral", {"num_local_experts": 0}, ("num_local_experts in the model's settings is 0",)),
        ("mixtral", {"num_experts_per_tok": 6}, ("6 of 5 experts", "num_experts_per_tok")),
        (
            "qwen3_moe",
            {"num_experts": None, "num_local_experts": None},
            ("num_experts in the model's settings is None",),
        ),
        ("deepseek_v3", {"kv_lora_rank": None}, ("kv_lora_rank in the model's settings is None",)),
        ("deepseek_v3", {"n_shared_experts": -1}, ("n_shared_experts in the model's settings is -1", "from 0 to")),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, ("qk_rope_head_dim 7 is odd",)),
        ("deepseek_v3", {"topk_method": "greedy"}, ("topk_method = 'greedy'", "'noaux_tc'")),
        ("deepseek_v2", {"topk_method": "best"}, ("topk_method", "'best'", "greedy, group_limited_greedy, noaux_tc")),
    ],
)
def test_experts_and_latents_that_cannot_be_are_refused(architecture, changes, words):
    refused(planned(architecture).to_dict() | changes, *words)


def test_mixtrals_window_is_none_where_the_key_is_absent():
    config = planned("mixtral").to_dict()
    assert limit_of(read_hf_config(config | {"sliding_window": 512})) == 512
    assert limit_of(read_hf_config({key: config[key] for key in config if key != "sliding_window"})) is None


SOUND = {
    **{family: config(**SIZES).to_dict() for family, config in CONFIGS.items()},
    **{family: config(**SIZES | sizes).to_dict() for family, (config, sizes) in PLANNED.items()},
}
DEEP_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "truncate": False, "beta_fast": 30}


def assert_sentence(error):
    assert 10 < len(str(error).encode()) < 400


def assert_read_or_refused(read_spec):
    """In a sentence; what is read travels to workers."""
    try:
        spec = read_spec()
    except UserError as error:
        assert_sentence(error)
        return
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ModelSpec) == spec


@pytest.mark.parametrize("family", SOUND)
@given(data=st.data())
def test_a_config_with_any_value_is_read_or_refused_in_a_sentence(family, data):
    factors = [2.0] * (attention_of(read_hf_config(SOUND[family])).rotated_size // 2)
    longrope = SCALINGS["longrope"] | {"short_factor": factors, "long_factor": factors}
    rope = data.draw(st.sampled_from([{"rope_theta": 5e5}, DEEP_YARN, longrope, LLAMA3, SCALINGS["dynamic"]]))
    known = FAMILIES[SOUND[family]["model_type"]].fields
    config = SOUND[family] | {"use_sliding_window": True, "rope_parameters": rope}
    config = config if "sliding_window" in known.defaults else SOUND[family] | {"rope_parameters": rope}
    names = {*REQUIRED, *OPTIONAL, *NEUTRAL, *WINDOW, *known.defaults, *known.neutral, *known.aliases}
    key = data.draw(st.sampled_from(sorted(names - {"rope_parameters"})))
    inner = data.draw(st.sampled_from(sorted(rope)))
    value = data.draw(VALUES)
    changed = data.draw(
        st.sampled_from([{key: value}, {"rope_parameters": value}, {"rope_parameters": rope | {inner: value}}])
    )
    assert_read_or_refused(lambda: read_hf_config(config | changed))


@given(value=VALUES)
def test_any_end_of_sequence_is_read_or_refused_in_a_sentence(value):
    assert_read_or_refused(lambda: read_hf_config(MINIMAL, {"eos_token_id": value}))


@given(data=st.data())
def test_gguf_metadata_with_any_value_are_read_or_refused_in_a_sentence(data):
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 2048, "finetuned": True, "attn_factor": 1.0}
    optional = {"llama.attention.key_length": 64, "llama.attention.sliding_window": 512, "tokenizer.ggml.tokens": ["a"]}
    sound = GGUF | {f"llama.rope.scaling.{key}": value for key, value in scaling.items()} | optional
    key = data.draw(st.sampled_from(sorted(sound)))
    present = data.draw(st.sampled_from([GGUF, GGUF | optional, sound]))
    assert_read_or_refused(lambda: read_gguf(present | {key: data.draw(VALUES)}))


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": "linear"},
        {"rope_parameters": True},
        {"original_max_position_embeddings": []},
        {"sliding_window": "x"},
        {"sliding_window": []},
        {"layer_types": True},
        {"layer_types": "sliding_attention"},
        {"eos_token_id": True},
        {"eos_token_id": 10**30},
        {"eos_token_id": [2, "x"]},
        {"hidden_size": 2**31},
        {"max_position_embeddings": 10**5000},
        {"tie_word_embeddings": "false"},
        {"use_sliding_window": 1},
        {"dtype": ["bfloat16"]},
        {"model_type": []},
        {"hidden_act": 10**5000},
    ],
    ids=lambda change: "-".join(change),
)
def test_what_no_config_can_have_is_refused_by_name(change):
    config = SOUND["mistral"] if "sliding_window" in change else SOUND["qwen3"]
    (key,) = change
    words = {"model_type": "architecture"}.get(key, key)
    with pytest.raises(UserError, match=words):
        read_hf_config(config | change)


def test_minus_one_is_no_token_that_ends_a_sequence():
    assert read(MINIMAL, eos_token_id=-1).vocabulary.eos_token_ids == ()
    assert read(MINIMAL, eos_token_id=[2, -1]).vocabulary.eos_token_ids == (2,)


def test_a_quantised_checkpoint_can_be_planned_with():
    plain, quantised = read(MINIMAL), read(MINIMAL, quantization_config={"quant_method": "fp8"})
    assert quantised.checkpoint.quantisation is not None
    checkpoint = replace(plain.checkpoint, quantisation=quantised.checkpoint.quantisation)
    assert quantised == replace(plain, checkpoint=checkpoint)


def test_every_dtype_of_the_engine_has_its_bytes():
    assert [64 * FORMATS[dtype].weight_bytes for dtype in WEIGHT_DTYPES] == [256, 128, 128, 72, 40, 66, 33, 36]


@pytest.mark.parametrize("causal", [False, 0, "no"])
def test_gguf_models_that_see_later_tokens_are_refused(causal):
    assert read_gguf(GGUF | {"llama.attention.causal": True})
    with pytest.raises(UserError, match=r"attention\.causal in the GGUF file is"):
        read_gguf(GGUF | {"llama.attention.causal": causal})
