"""Llama 1 to 3, and models of the same architecture."""

from collections.abc import Mapping
from typing import Any

from longhelix.spec.config import switch
from longhelix.spec.config_parts import alike, biases, dense, grouped_query
from longhelix.spec.family import DECODER, ConfigFields, Family
from longhelix.spec.gguf import GgufForm, GgufMetadata, dense_settings
from longhelix.spec.layer import LayerSpec
from longhelix.spec.rope import RopeSettings


def _layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    attention = grouped_query(config, rope, projections=biases(config))
    return alike(config, attention, dense(config, bias=switch(config, "mlp_bias")))


def _gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    """Files do not say whether there are biases, but have them as tensors."""
    biased = {
        "attention_bias": "model.layers.0.self_attn.q_proj.bias",
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias",
    }
    return {**dense_settings(metadata), **{name: bias in metadata.tensors for name, bias in biased.items()}}


GGUF_HEADS = frozenset({"attn_q", "attn_k"})  # modules whose rows are stored for interleaved rotation

FAMILIES = {
    "llama": Family(
        _layers,
        ConfigFields(
            defaults={
                **DECODER,
                "max_position_embeddings": 2048,
                "num_key_value_heads": None,
                "head_dim": None,
                "attention_bias": False,
                "mlp_bias": False,
                "eos_token_id": 2,
            },
        ),
        gguf=GgufForm(
            "llama",
            _gguf_settings,
            # The others are Mixtral's and Mistral's.
            matches=lambda metadata: not (metadata.sets("expert_count") or metadata.sets("attention.sliding_window")),
            interleaved=GGUF_HEADS,
        ),
    )
}
