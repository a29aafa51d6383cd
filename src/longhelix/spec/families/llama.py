"""Llama 1 to 3, and models of the same architecture."""

from collections.abc import Mapping
from typing import Any

from longhelix.spec.config import switch
from longhelix.spec.config_parts import alike, biases, dense, grouped_query
from longhelix.spec.family import DECODER, ConfigFields, Family
from longhelix.spec.layer import LayerSpec
from longhelix.spec.rope import RopeSettings


def _layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    attention = grouped_query(config, rope, projections=biases(config))
    return alike(config, attention, dense(config, bias=switch(config, "mlp_bias")))


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
    )
}
