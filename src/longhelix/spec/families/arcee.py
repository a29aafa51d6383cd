"""Arcee: Llama with FFNs that have no gate, and the square of ReLU."""

from collections.abc import Mapping
from typing import Any

from longhelix.spec.config import switch
from longhelix.spec.config_parts import activation, alike, biases, dense, grouped_query
from longhelix.spec.family import DECODER, ConfigFields, Family
from longhelix.spec.layer import LayerSpec
from longhelix.spec.rope import RopeSettings


def _layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    attention = grouped_query(config, rope, projections=biases(config))
    function = activation(config, "hidden_act", gated=False)
    return alike(config, attention, dense(config, bias=switch(config, "mlp_bias"), activation=function))


FAMILIES = {
    "arcee": Family(
        _layers,
        ConfigFields(
            defaults={
                **DECODER,
                "hidden_act": "relu2",
                "max_position_embeddings": 4096,
                "rms_norm_eps": 1e-5,
                "num_key_value_heads": None,
                "head_dim": None,
                "attention_bias": False,
                "mlp_bias": False,
                "eos_token_id": 128001,
            },
        ),
    )
}
