"""Qwen1.5-MoE and Qwen2-MoE: routed experts and a shared expert. Some of the first layers may have a window."""

from collections.abc import Mapping
from typing import Any

from longhelix.spec.attention import Projections
from longhelix.spec.config import count, switch
from longhelix.spec.config_parts import (
    IN_EVERY_LAYER,
    QWEN_LAYERS,
    grouped_query,
    num_layers,
    qwen_experts,
    qwen_windowed,
    stack,
)
from longhelix.spec.family import DECODER, ConfigFields, Family
from longhelix.spec.gguf import GgufForm, GgufMetadata, expert_settings
from longhelix.spec.layer import LayerSpec
from longhelix.spec.rope import RopeSettings


def _layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    total, bound = num_layers(config), count(config, "max_window_layers", least=0)
    has_window = [layer % 2 == 0 and layer < bound for layer in range(total)]
    attention = grouped_query(config, rope, projections=Projections(qkv_bias=switch(config, "qkv_bias")))
    experts = qwen_experts(config, normalised=switch(config, "norm_topk_prob"), shared=True)
    return stack(qwen_windowed(config, attention, has_window), [experts] * total)


def _gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """Old files have no sizes of experts, which follow from the size of all experts of a token."""
    per_token, shared = metadata.count("expert_used_count"), "expert_shared_feed_forward_length"
    of_token = metadata.count("feed_forward_length") if metadata.has("feed_forward_length") else None
    return {
        **expert_settings(metadata, None if of_token is None else of_token // per_token),
        "shared_expert_intermediate_size": metadata.count(shared, of_token),
        "norm_topk_prob": metadata.switch("expert_weights_norm", False),
    }


FAMILIES = {
    "qwen2_moe": Family(
        _layers,
        ConfigFields(
            defaults={
                **DECODER,
                "max_position_embeddings": 32768,
                **QWEN_LAYERS,
                "num_key_value_heads": 16,
                "head_dim": None,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
                "num_experts_per_tok": 4,
                "num_experts": 60,
                "norm_topk_prob": False,
                "qkv_bias": True,
            },
            nullable=frozenset({"sliding_window"}),
            neutral=IN_EVERY_LAYER,
        ),
        gguf=GgufForm("qwen2moe", _gguf_settings),
        tensors={
            f"mlp.shared_experts.{name}.weight": f"mlp.shared_expert.{name}.weight"
            for name in ("gate_proj", "up_proj", "down_proj")
        },
    )
}
