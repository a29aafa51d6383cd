"""Fields of config.json that longhelix reads, refuses or may leave unread, held against transformers' own classes."""

from dataclasses import fields

import pytest
from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig

from longhelix.spec import FAMILIES, unread_fields
from longhelix.spec.config_fields import HARMLESS, NEUTRAL, OPTIONAL, REQUIRED, WINDOW
from longhelix.spec.vision import _DEPTH, _OUT_SIZE, _TAPS, _TOKENS

pytestmark = pytest.mark.unit

# Read by models although no class declares them: older spellings, and what models' own code had.
UNDECLARED = {
    "rope_theta", "rope_scaling", "partial_rotary_factor", "torch_dtype", "head_dim", "full_attention_interval",
    "rope_interleave", "sliding_rope_parameters", "sliding_window_pattern",
}  # fmt: skip


def config_class(architecture):
    """transformers' class of the decoder's config."""
    made = CONFIG_MAPPING["deepseek_v3" if architecture == "kimi_k2" else architecture]
    return made.sub_configs.get("text_config", made)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_field_of_transformers_is_read_refused_or_known_to_be_harmless(architecture):
    known, made = FAMILIES[architecture].fields, config_class(architecture)
    read = REQUIRED | known.defaults.keys() | known.aliases.keys() | known.neutral.keys() | NEUTRAL.keys()
    harmless = frozenset().union(*HARMLESS.values()) | known.ignored
    if "sliding_window" not in known.defaults:
        harmless |= WINDOW  # `completed` refuses a window
    names = {field.name for field in fields(made)} | set(made.attribute_map)
    assert names - read - harmless == set()
    assert not read & frozenset().union(*HARMLESS.values())
    assert all(reason for reason in HARMLESS)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_absent_fields_have_transformers_defaults(architecture):
    family, made = FAMILIES[architecture], config_class(architecture)
    known = family.fields
    declared = {field.name: field.default for field in fields(made)}
    theta = made.default_theta
    if isinstance(theta, dict):  # layers with a window have one of their own
        config = family.decoder({"text_config": {}, "model_type": architecture})
        assert config["sliding_rope_parameters"]["rope_theta"] == theta["local"]
        theta = theta["global"]
    assert known.defaults["rope_theta"] == theta
    for name, default in known.defaults.items():
        if name == "tie_word_embeddings" and family.vision is not None:
            continue  # which the whole model's config decides
        if name in declared and name != "rope_parameters":
            assert (name, default) == (name, declared[name])
        elif name not in declared:
            assert name in UNDECLARED | {"eos_token_id", "tie_word_embeddings"}
    for name, neutral in known.neutral.items():
        assert name not in declared or declared[name] in neutral.values
    filled = made(**dict.fromkeys(REQUIRED & declared.keys(), 64) | {"num_hidden_layers": 4})
    if known.defaults["partial_rotary_factor"] is not None:
        assert filled.rope_parameters["partial_rotary_factor"] == known.defaults["partial_rotary_factor"]
    for key, value in (known.defaults["rope_parameters"] or {}).items():
        assert filled.rope_parameters[key] == value


@pytest.mark.parametrize("architecture", FAMILIES)
def test_null_is_allowed_where_transformers_allows_it(architecture):
    """n_shared_experts is null in DeepSeek's own code where there are none, and theta's null is refused later."""
    known, made = FAMILIES[architecture].fields, config_class(architecture)
    kinds = {field.name: field.type for field in fields(made)}
    for name in known.nullable - {"n_shared_experts"}:
        assert "None" in str(kinds[name]), name
    refused_by_models = {"v_head_dim", "n_group", "topk_group", "num_experts_per_tok", "first_k_dense_replace"}
    if architecture == "qwen2_moe":
        refused_by_models.add("num_key_value_heads")
    nullable = {name for name in known.defaults if name in kinds and "None" in str(kinds[name])}
    with_default = {name for name in nullable if known.defaults[name] is not None}
    assert with_default - known.nullable - refused_by_models - {"eos_token_id"} == set()


def test_generation_settings_are_those_that_transformers_drops():
    dropped = {*GenerationConfig._get_default_generation_params()}
    assert dropped <= frozenset().union(*HARMLESS.values())
    assert {field.name for field in fields(PreTrainedConfig)} <= frozenset().union(
        *HARMLESS.values(), NEUTRAL, {"dtype"}
    )


@pytest.mark.parametrize("architecture", ["qwen3_vl", "qwen3_vl_moe"])
def test_absent_fields_around_a_tower_have_transformers_defaults(architecture):
    whole = CONFIG_MAPPING[architecture]()
    assert {name: getattr(whole, f"{name}_token_id") for name in _TOKENS} == _TOKENS
    tower = whole.vision_config
    assert (tower.out_hidden_size, tower.depth, tuple(tower.deepstack_visual_indexes)) == (_OUT_SIZE, _DEPTH, _TAPS)


def test_fields_that_nobody_knows_are_named():
    config = {"model_type": "qwen3", "hidden_size": 8, "dual_chunk_attention_config": {}, "use_mrope": False}
    assert unread_fields(config) == ("dual_chunk_attention_config", "use_mrope")
    rope = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attn_factor": 0.8, "finetuned": True}}
    assert unread_fields({"model_type": "qwen3"} | rope) == ("attn_factor",)
    assert unread_fields({"model_type": "qwen3_vl", "text_config": {"colour": 1}}) == ("colour",)
    assert unread_fields({"model_type": "qwen3"} | dict.fromkeys(OPTIONAL, 1)) == ()
