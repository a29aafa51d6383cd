"""Mixtral: Mistral with experts."""

from collections.abc import Mapping
from typing import Any

from longhelix.spec.config import count
from longhelix.spec.config_parts import alike, always_windowed, grouped_query
from longhelix.spec.families.llama import GGUF_HEADS
from longhelix.spec.family import DECODER, ConfigFields, Family
from longhelix.spec.gguf import GgufForm, GgufMetadata, dense_settings
from longhelix.spec.layer import LayerSpec
from longhelix.spec.moe import MoE
from longhelix.spec.rope import RopeSettings


def _layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    experts = MoE(
        count(config, "num_local_experts"), count(config, "num_experts_per_tok"), count(config, "intermediate_size")
    )
    return alike(config, always_windowed(config, grouped_query(config, rope)), experts)


def _gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    window = "attention.sliding_window"
    return {
        **dense_settings(metadata),  # of an expert
        "num_local_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "sliding_window": metadata.count(window) if metadata.sets(window) else None,
    }


FAMILIES = {
    "mixtral": Family(
        _layers,
        ConfigFields(
            defaults={
                **DECODER,
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "head_dim": None,
                "sliding_window": None,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1e6,
                "num_experts_per_tok": 2,
                "num_local_experts": 8,
                "eos_token_id": 2,
            },
            aliases={"num_experts": "num_local_experts"},
            ignored=frozenset({"layer_types", "use_sliding_window"}),
        ),
        gguf=GgufForm(
            "llama", _gguf_settings, matches=lambda metadata: metadata.sets("expert_count"), interleaved=GGUF_HEADS
        ),
        tensors={
            "mlp.gate.weight": "block_sparse_moe.gate.weight",
            "mlp.experts.{}.gate_proj.weight": "block_sparse_moe.experts.{}.w1.weight",
            "mlp.experts.{}.up_proj.weight": "block_sparse_moe.experts.{}.w3.weight",
            "mlp.experts.{}.down_proj.weight": "block_sparse_moe.experts.{}.w2.weight",
        },
    )
}
