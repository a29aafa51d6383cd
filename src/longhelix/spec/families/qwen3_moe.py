"""Qwen3-MoE: normed queries and keys, and experts. All layers may have a sliding window."""

from collections.abc import Mapping
from typing import Any

from longhelix.spec.config import switch
from longhelix.spec.config_parts import (
    IN_EVERY_LAYER,
    QWEN_WINDOW,
    alike,
    always_windowed,
    biases,
    grouped_query,
    qwen_experts,
)
from longhelix.spec.family import DECODER, ConfigFields, Family
from longhelix.spec.gguf import GgufForm, GgufMetadata, expert_settings
from longhelix.spec.layer import LayerSpec
from longhelix.spec.norms import HeadNorms
from longhelix.spec.rope import RopeSettings


def _layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    attention = grouped_query(config, rope, projections=biases(config), norms=HeadNorms(qk=True))
    if switch(config, "use_sliding_window"):
        attention = always_windowed(config, attention)
    return alike(config, attention, qwen_experts(config, normalised=switch(config, "norm_topk_prob")))


def _gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    return {**expert_settings(metadata), "norm_topk_prob": metadata.switch("expert_weights_norm", True)}


FAMILIES = {
    "qwen3_moe": Family(
        _layers,
        ConfigFields(
            defaults={
                **DECODER,
                "max_position_embeddings": 32768,
                **QWEN_WINDOW,
                "num_key_value_heads": 4,
                "head_dim": None,
                "attention_bias": False,
                "moe_intermediate_size": 768,
                "num_experts_per_tok": 8,
                "num_experts": 128,
                "norm_topk_prob": False,
            },
            nullable=frozenset({"sliding_window"}),
            aliases={"num_local_experts": "num_experts"},
            neutral=IN_EVERY_LAYER,
            ignored=frozenset({"layer_types", "max_window_layers"}),
        ),
        gguf=GgufForm("qwen3moe", _gguf_settings),
    )
}
