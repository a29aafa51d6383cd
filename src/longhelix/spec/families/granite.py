"""Granite: Llama with multipliers of embeddings, attention scores, residuals and logits."""

from collections.abc import Mapping
from typing import Any

import msgspec

from longhelix.spec.attention import Scores
from longhelix.spec.config import positive, switch
from longhelix.spec.config_parts import alike, biases, dense, grouped_query
from longhelix.spec.family import DECODER, ConfigFields, Family
from longhelix.spec.layer import LayerSpec
from longhelix.spec.rope import RopeSettings
from longhelix.spec.vocabulary import Multipliers


def _layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    scores = Scores(scale=positive(config, "attention_multiplier"))
    attention = grouped_query(config, rope, projections=biases(config), scores=scores)
    layers = alike(config, attention, dense(config, bias=switch(config, "mlp_bias")))
    scale = positive(config, "residual_multiplier")
    return tuple(msgspec.structs.replace(layer, residual_scale=scale) for layer in layers)


def _multipliers(config: Mapping[str, Any]) -> Multipliers:
    return Multipliers(
        embedding=positive(config, "embedding_multiplier"), logits=1 / positive(config, "logits_scaling")
    )


FAMILIES = {
    "granite": Family(
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
                "attention_multiplier": 1.0,
                "residual_multiplier": 1.0,
                "embedding_multiplier": 1.0,
                "logits_scaling": 1.0,
            },
        ),
        multipliers=_multipliers,
    )
}
