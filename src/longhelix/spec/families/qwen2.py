"""Qwen2 and Qwen2.5: queries, keys and values with biases. The last layers may have a sliding window."""

from collections.abc import Mapping
from typing import Any

from longhelix.spec.attention import Projections
from longhelix.spec.config_parts import (
    QWEN_LAYERS,
    dense,
    grouped_query,
    num_layers,
    qwen_windowed,
    stack,
    windowed_from,
)
from longhelix.spec.family import DECODER, ConfigFields, Family
from longhelix.spec.gguf import GgufForm, dense_settings
from longhelix.spec.layer import LayerSpec
from longhelix.spec.rope import RopeSettings


def _layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    attention = grouped_query(config, rope, projections=Projections(qkv_bias=True))
    mixers = qwen_windowed(config, attention, windowed_from(config))
    return stack(mixers, [dense(config)] * num_layers(config))


FAMILIES = {
    "qwen2": Family(
        _layers,
        ConfigFields(
            defaults={
                **DECODER,
                "max_position_embeddings": 32768,
                **QWEN_LAYERS,
                "num_key_value_heads": 32,
                "head_dim": None,
            },
            nullable=frozenset({"num_key_value_heads", "sliding_window"}),
        ),
        gguf=GgufForm("qwen2", dense_settings),
    )
}
