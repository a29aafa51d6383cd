"""Gemma 2 and 3: norms before and after attention and FFNs, windows in most layers, and GELU.

Gemma 2 caps scores and logits. Gemma 3 norms queries and keys, and its layers with a window have a rotation of their
own. Of Gemma 3 with a vision tower, longhelix runs the decoder.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from longhelix.spec.attention import GroupedQueryAttention, Scores, Visibility
from longhelix.spec.config import count, count_or_none, positive
from longhelix.spec.config_parts import activation, biases, dense, grouped_query, has_windows, num_layers, stack
from longhelix.spec.family import DECODER, ConfigFields, Family
from longhelix.spec.layer import LayerSpec
from longhelix.spec.norms import HeadNorms, Norms
from longhelix.spec.rope import RopeSettings
from longhelix.spec.vision import decoder_config
from longhelix.spec.vocabulary import Multipliers
from longhelix.values import refused

_LOCAL_ROPE = "sliding_rope_parameters"  # of layers with a window, in configs that `_with_local_rope` returns
_LOCAL_THETA = 10_000.0


def _gemma2_layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    scores = msgspec.structs.replace(_scores(config), cap=_cap(config, "attn_logit_softcapping"))
    attention = grouped_query(config, rope, projections=biases(config), scores=scores)
    return _layers(config, attention, attention, period=2)


def _gemma3_layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    attention = grouped_query(
        config, rope, projections=biases(config), norms=HeadNorms(qk=True), scores=_scores(config)
    )
    local_rope = RopeSettings(config[_LOCAL_ROPE], rope.max_positions).of(attention.head_size)
    local = msgspec.structs.replace(attention, rope=local_rope)
    return _layers(config, attention, local, period=count(config, "sliding_window_pattern"))


def _layers(
    config: Mapping[str, Any], full: GroupedQueryAttention, local: GroupedQueryAttention, period: int
) -> tuple[LayerSpec, ...]:
    """Return the layers: those with a window have `local` attention, each `period`-th one has `full` attention."""
    window = Visibility(window_tokens=count_or_none(config, "sliding_window"))
    local = msgspec.structs.replace(local, visibility=window)
    mixers = [local if has_window else full for has_window in has_windows(config, period)]
    ffn = dense(config, activation=activation(config, "hidden_activation"))
    return stack(mixers, [ffn] * num_layers(config), Norms(after=True, plus_one=True))


def _scores(config: Mapping[str, Any]) -> Scores:
    return Scores(scale=positive(config, "query_pre_attn_scalar") ** -0.5)


def _cap(config: Mapping[str, Any], key: str) -> float | None:
    return None if config[key] is None else positive(config, key)


def _multipliers(config: Mapping[str, Any]) -> Multipliers:
    cap = _cap(config, "final_logit_softcapping")
    return Multipliers(embedding=count(config, "hidden_size") ** 0.5, rounded=True, logit_cap=cap)


def _with_local_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the rope settings of layers that see everything, and those of layers with a window apart.

    `rope_parameters` may have both by type of layer. `rope_theta`, `rope_local_base_freq` and `rope_scaling` of older
    configs count where it has no such setting. `rope_scaling` belongs to layers that see everything.
    """
    by_type = config.get("rope_parameters") or {}
    if not isinstance(by_type, Mapping) or by_type.keys() - {"full_attention", "sliding_attention"}:
        allowed = "settings by type of layer, full_attention and sliding_attention"
        raise refused("rope_parameters in the model's settings", by_type, allowed, "invalid_model")
    full, local = (_settings(by_type, kind) for kind in ("full_attention", "sliding_attention"))
    scaling = config.get("rope_scaling")
    if isinstance(scaling, Mapping):
        full |= scaling
    local.setdefault("rope_theta", config.get("rope_local_base_freq", _LOCAL_THETA))
    others = {key: value for key, value in config.items() if key not in ("rope_local_base_freq", "rope_scaling")}
    if scaling is not None and not isinstance(scaling, Mapping):
        others["rope_scaling"] = scaling  # which is refused
    return others | {"rope_parameters": full, _LOCAL_ROPE: local}


def _settings(by_type: Mapping[str, Any], kind: str) -> dict[str, Any]:
    settings = by_type.get(kind)
    if not isinstance(settings, Mapping | None):
        raise refused(f"{kind} in rope_parameters", settings, "settings by name, or null", "invalid_model")
    return {"rope_type": "default"} if settings is None else dict(settings)


def _text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's part of a config with a vision tower. Its embeddings are tied unless a config says so."""
    text = {**decoder_config(config)}
    tied = config.get("tie_word_embeddings", config["text_config"].get("tie_word_embeddings", True))
    return _with_local_rope(text | {"tie_word_embeddings": tied})


_COMMON: Mapping[str, Any] = {
    **DECODER,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_IGNORED = frozenset({"hidden_act", "cache_implementation"})
_GEMMA3 = Family(
    _gemma3_layers,
    ConfigFields(
        defaults={
            **_COMMON,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "rope_theta": 1_000_000.0,
            _LOCAL_ROPE: {},
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
        },
        nullable=frozenset({"sliding_window"}),
        ignored=_IGNORED | {"_sliding_window_pattern"},
    ),
    decoder=_with_local_rope,
    multipliers=_multipliers,
)
FAMILIES = {
    "gemma2": Family(
        _gemma2_layers,
        ConfigFields(
            defaults={
                **_COMMON,
                "vocab_size": 256000,
                "max_position_embeddings": 8192,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
            nullable=frozenset({"sliding_window", "attn_logit_softcapping", "final_logit_softcapping"}),
            ignored=_IGNORED,
        ),
        multipliers=_multipliers,
    ),
    "gemma3_text": _GEMMA3,
    "gemma3": replace(_GEMMA3, decoder=_text_config),
}
