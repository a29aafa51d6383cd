"""Mistral: all layers may have a sliding window."""

from collections.abc import Mapping
from typing import Any

from longhelix.spec.config_parts import alike, always_windowed, dense, grouped_query
from longhelix.spec.families.llama import GGUF_HEADS
from longhelix.spec.family import DECODER, ConfigFields, Family
from longhelix.spec.gguf import GgufForm, GgufMetadata, dense_settings
from longhelix.spec.layer import LayerSpec
from longhelix.spec.rope import RopeSettings


def _layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    return alike(config, always_windowed(config, grouped_query(config, rope)), dense(config))


def _gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    return {**dense_settings(metadata), "sliding_window": metadata.count("attention.sliding_window")}


FAMILIES = {
    "mistral": Family(
        _layers,
        ConfigFields(
            defaults={
                **DECODER,
                "max_position_embeddings": 131072,
                "num_key_value_heads": 8,
                "head_dim": None,
                "sliding_window": 4096,
                "eos_token_id": 2,
            },
            nullable=frozenset({"sliding_window"}),
            ignored=frozenset({"layer_types", "use_sliding_window"}),
        ),
        gguf=GgufForm(
            "llama",
            _gguf_settings,
            matches=lambda metadata: metadata.sets("attention.sliding_window") and not metadata.sets("expert_count"),
            interleaved=GGUF_HEADS,
        ),
    )
}
