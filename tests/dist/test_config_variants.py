"""Variants of config.json of every family that runs: longhelix runs them as transformers does, or refuses them in
words."""

import random
import secrets
from collections import Counter

import pytest

from config_variants import CONFIGS, VISION, compare, draw, with_changes

pytestmark = pytest.mark.dist

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
RUN = [
    ("llama", {"rope_parameters": YARN, "rope_scaling": {"type": "linear", "factor": 2.0}}, ()),
    ("llama", {"rope_parameters": YARN, "rope_scaling": {}}, ("rope_theta",)),
    ("granite", {"residual_multiplier": 0.3, "logits_scaling": 8}, ("attention_multiplier", "embedding_multiplier")),
    ("arcee", {"hidden_act": "gelu", "mlp_bias": True}, ("num_key_value_heads",)),
    ("exaone4", {"layer_types": ["full_attention", "sliding_attention"]}, ("sliding_window_pattern",)),
    ("gemma2", {"hidden_activation": "gelu", "final_logit_softcapping": None}, ("attn_logit_softcapping",)),
    ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, ("rope_theta", "rope_local_base_freq")),
    ("gemma3_text", {"rope_scaling": {"type": "linear", "factor": 8.0}, "query_pre_attn_scalar": 8}, ()),
    (
        "gemma3_text",
        {"rope_parameters": {"full_attention": YARN, "sliding_attention": {"rope_theta": 500.0}}},
        ("rope_scaling", "sliding_window_pattern"),
    ),
    ("mistral", {"layer_types": ["full_attention"] * 2}, ("rms_norm_eps", "max_position_embeddings")),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 28}, ("rope_scaling",)),
    ("qwen3", {"rope_scaling": YARN | {"attn_factor": 0.8, "finetuned": True}}, ()),
    ("mixtral", {}, ("rope_theta", "num_experts_per_tok", "rms_norm_eps")),
    ("mixtral", {"num_experts": 4}, ()),
    ("qwen2_moe", {}, ("norm_topk_prob", "num_experts_per_tok")),
    ("qwen3_moe", {"num_local_experts": 4}, ()),
    ("qwen3_vl", {}, ("rope_theta",)),
    ("deepseek_v2", {}, ("topk_method", "routed_scaling_factor", "first_k_dense_replace")),
    ("deepseek_v2", {"norm_topk_prob": True}, ()),
    ("deepseek_v3", {"rope_interleave": False}, ()),
    ("deepseek_v3", {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}, ("n_shared_experts",)),
    ("deepseek_v3", {"n_group": 4}, ("routed_scaling_factor", "topk_group", "norm_topk_prob")),
    ("kimi_k2", {"rope_interleave": None, "norm_topk_prob": None}, ("first_k_dense_replace",)),
]
REFUSED = [
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
    ("gemma3_text", {"hidden_activation": "selu"}, "hidden_activation"),
    ("gemma3_text", {"rope_parameters": YARN}, "rope_parameters"),
    ("exaone4", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ("granite", {"logits_scaling": 0}, "logits_scaling"),
    ("granite", {"residual_multiplier": None}, "residual_multiplier"),
    ("llama", {"logits_scaling": 2.0}, "logits_scaling = 2.0"),
    ("llama", {"is_causal": False}, "is_causal = False"),
    ("llama", {"is_causal": None}, "is_causal = None"),
    ("qwen2", {"is_causal": False}, "is_causal = False"),
    ("llama", {"rms_norm_eps": None}, "rms_norm_eps"),
    ("llama", {"rope_theta": None}, "rope_theta"),
    ("mistral", {"num_key_value_heads": None}, "num_key_value_heads"),
    ("qwen3", {"per_layer_config": {"0": {"head_dim": 8}}}, "per_layer_config"),
    ("qwen3_vl_moe", {"norm_topk_prob": False}, "norm_topk_prob = False"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    ("deepseek_v3", {"routed_scaling_factor": None}, "routed_scaling_factor"),
]
NUM_CASES = 300


@pytest.mark.parametrize(("family", "changes", "absent"), RUN)
def test_a_variant_equals_transformers(tmp_path, family, changes, absent):
    outcome = compare(tmp_path, with_changes(family, changes, absent))
    assert outcome.kind == "equal", outcome


@pytest.mark.parametrize(("family", "changes", "words"), REFUSED)
def test_a_variant_that_would_run_otherwise_is_refused_by_name(tmp_path, family, changes, words):
    outcome = compare(tmp_path, with_changes(family, changes))
    assert outcome.kind in ("refused", "impossible"), outcome
    assert words in outcome.message


DEEP_YARN = YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}
REPLACED = [
    (None, DEEP_YARN),
    (DEEP_YARN, {"rope_type": "linear", "factor": 2.0}),
    (DEEP_YARN, {"rope_type": "default"}),
    (DEEP_YARN, YARN | {"factor": 8.0}),
    (DEEP_YARN, YARN | {"factor": 8.0, "mscale_all_dim": 1.0, "rope_theta": 5e4}),
    ({"rope_type": "su", "speed": 3}, DEEP_YARN),  # which longhelix would not run
]


@pytest.mark.parametrize(("saved", "option"), REPLACED)
@pytest.mark.parametrize("family", ["llama", "deepseek_v2", "deepseek_v3", "kimi_k2"])
def test_rope_scaling_replaces_all_that_follows_from_the_configs_own(tmp_path, family, saved, option):
    """The scale of latent attention's scores among it."""
    config = with_changes(family, {"rope_scaling": saved, "rope_theta": 2e4})
    outcome = compare(tmp_path, config, rope_scaling=option)
    assert outcome.kind == "equal", outcome


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_drawn_variants_equal_transformers_or_are_refused_by_name(tmp_path):
    seed = secrets.randbelow(2**32)
    print(f"seed {seed}")
    chance, kinds, families = random.Random(seed), Counter(), [*CONFIGS, *VISION]
    for index in range(NUM_CASES):
        family = families[index % len(families)]
        changes, absent = draw(family, chance)
        folder = tmp_path / str(index)
        folder.mkdir()
        case = f"seed {seed}, case {index}: {family} with {changes}, without {absent}"
        outcome = compare(folder, with_changes(family, changes, absent), index)
        kinds[outcome.kind] += 1
        assert outcome.kind != "unequal", f"{case}: {outcome.message}"
        if outcome.kind == "refused":  # for what was changed, and nothing else
            assert any(name in outcome.message for name in (*changes, *absent, *NAMED_OTHERWISE)), f"{case}: {outcome}"
    print(dict(kinds))
    assert kinds["equal"] >= NUM_CASES / 2


# What messages call fields that they do not name: a rope setting, and more experts for a token than its groups have.
NAMED_OTHERWISE = (
    "a token takes",
    "a token cannot take",
    "rope type",
    "rope setting",
    "mrope_section",
    "partial_rotary_factor",
)
