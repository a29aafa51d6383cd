"""DeepSeek-V3 and Kimi K2: latent attention, and experts with sigmoid scores."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from longhelix.spec.config_parts import (
    LATENTS,
    NO_KV_HEADS,
    after_dense,
    dense,
    latent,
    num_layers,
    sigmoid_experts,
    stack,
)
from longhelix.spec.families.deepseek_v2 import has_sigmoid
from longhelix.spec.family import DECODER, ConfigFields, Family, Neutral
from longhelix.spec.gguf import GgufForm, GgufMetadata, both_scales, latent_expert_settings
from longhelix.spec.layer import LayerSpec
from longhelix.spec.rope import RopeSettings


def _layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    ffns = after_dense(config, dense(config), sigmoid_experts(config))
    return stack([latent(config, rope)] * num_layers(config), ffns)


def _gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    return {
        **latent_expert_settings(metadata),
        "norm_topk_prob": metadata.switch("expert_weights_norm", False),
    }


DEEPSEEK_V3 = Family(
    _layers,
    ConfigFields(
        defaults={
            **DECODER,
            "max_position_embeddings": 4096,
            **LATENTS,
            "eos_token_id": 1,
            "moe_intermediate_size": 2048,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "rope_interleave": True,
        },
        nullable=frozenset({"q_lora_rank", "norm_topk_prob", "rope_interleave", "n_shared_experts"}),
        aliases={"num_local_experts": "n_routed_experts"},
        neutral={
            "moe_layer_freq": Neutral((1,), "experts in every layer after the first, dense ones"),
            "topk_method": Neutral(("noaux_tc", None), "a bias for each expert in the choice of experts"),
            "scoring_func": Neutral(("sigmoid",), "sigmoid scores"),
        },
        ignored=NO_KV_HEADS,
    ),
)
_GGUF = GgufForm(
    "deepseek2",
    _gguf_settings,
    matches=has_sigmoid,
    log_multiplier=both_scales,
)
FAMILIES = {"deepseek_v3": replace(DEEPSEEK_V3, gguf=_GGUF), "kimi_k2": DEEPSEEK_V3}
