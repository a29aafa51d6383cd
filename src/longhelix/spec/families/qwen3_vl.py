"""Qwen3-VL, dense and with experts: a vision tower and a Qwen3 decoder. Positions have three axes."""

from collections.abc import Mapping
from typing import Any

from longhelix.spec.attention import GroupedQueryAttention
from longhelix.spec.config_parts import IN_EVERY_LAYER, alike, biases, dense, grouped_query, qwen_experts
from longhelix.spec.family import DECODER, ConfigFields, Family, Neutral
from longhelix.spec.layer import LayerSpec
from longhelix.spec.norms import HeadNorms
from longhelix.spec.rope import RopeSettings
from longhelix.spec.vision import DEFAULT_SECTIONS, VisionSpec, decoder_config


def _attention(config: Mapping[str, Any], rope: RopeSettings) -> GroupedQueryAttention:
    return grouped_query(config, rope, projections=biases(config), norms=HeadNorms(qk=True))


def _dense_layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    return alike(config, _attention(config, rope), dense(config))


def _expert_layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    return alike(config, _attention(config, rope), qwen_experts(config, normalised=True))


_ROPE = {"mrope_section": DEFAULT_SECTIONS, "mrope_interleaved": True}
_DEFAULTS = {**DECODER, "max_position_embeddings": 128000, "rope_theta": 500_000.0, "attention_bias": False}

FAMILIES = {
    "qwen3_vl": Family(
        _dense_layers,
        ConfigFields(
            defaults={**_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128},
            nullable=frozenset({"num_key_value_heads"}),
        ),
        rope=_ROPE,
        decoder=decoder_config,
        vision=VisionSpec.from_hf_config,
    ),
    "qwen3_vl_moe": Family(
        _expert_layers,
        ConfigFields(
            defaults={
                **_DEFAULTS,
                "num_key_value_heads": 16,
                "head_dim": None,
                "moe_intermediate_size": 1408,
                "num_experts_per_tok": 4,
                "num_experts": 60,
            },
            aliases={"num_local_experts": "num_experts"},
            neutral={**IN_EVERY_LAYER, "norm_topk_prob": Neutral((True,), "expert weights that sum to one")},
        ),
        rope=_ROPE,
        decoder=decoder_config,
        vision=VisionSpec.from_hf_config,
    ),
}
