"""gpt-oss: attention sinks, a sliding window in every second layer, and experts with biases."""

from collections.abc import Mapping
from typing import Any

from longhelix.spec.attention import Scores, Visibility
from longhelix.spec.config import count, count_or_none
from longhelix.spec.config_parts import biases, grouped_query, has_windows, limited, num_layers, stack
from longhelix.spec.family import DECODER, ConfigFields, Family, Neutral
from longhelix.spec.ffn import Activation
from longhelix.spec.layer import LayerSpec
from longhelix.spec.moe import MoE
from longhelix.spec.rope import RopeSettings


def _layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    attention = grouped_query(config, rope, projections=biases(config), scores=Scores(sinks=True))
    window = Visibility(window_tokens=count_or_none(config, "sliding_window"))
    experts = MoE(
        count(config, "num_local_experts"),
        count(config, "num_experts_per_tok"),
        count(config, "intermediate_size"),
        biases=True,
        activation=Activation("clamped_swiglu"),
    )
    return stack(limited(attention, window, has_windows(config, 2)), [experts] * num_layers(config))


FAMILIES = {
    "gpt_oss": Family(
        _layers,
        ConfigFields(
            defaults={
                **DECODER,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "rope_theta": 150_000.0,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
                "num_key_value_heads": 8,
                "head_dim": 64,
                "attention_bias": True,
                "sliding_window": 128,
                "layer_types": None,
                "num_experts_per_tok": 4,
                "num_local_experts": 128,
            },
            nullable=frozenset({"sliding_window", "rope_parameters"}),
            aliases={"num_experts": "num_local_experts"},
            neutral={
                "swiglu_alpha": Neutral((1.702,), "the gate that its models are trained with"),
                "swiglu_limit": Neutral((7.0,), "the limit that its models are trained with"),
            },
            ignored=frozenset({"initial_context_length"}),
        ),
    )
}
