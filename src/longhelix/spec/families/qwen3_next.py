"""Qwen3-Next: Gated DeltaNet in most layers, gated attention with partly rotated heads in the others, and experts."""

from collections.abc import Mapping
from typing import Any

import msgspec

from longhelix.spec.config import count, switch
from longhelix.spec.config_parts import (
    IN_EVERY_LAYER,
    all_but_each,
    biases,
    grouped_query,
    layer_types,
    num_layers,
    qwen_experts,
    stack,
)
from longhelix.spec.family import DECODER, ConfigFields, Family
from longhelix.spec.layer import LayerSpec
from longhelix.spec.linear import LinearAttention
from longhelix.spec.norms import HeadNorms, Norms
from longhelix.spec.rope import RopeSettings


def _layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    projections = msgspec.structs.replace(biases(config), output_gate=True)
    attention = grouped_query(config, rope, partly_rotated=True, projections=projections, norms=HeadNorms(qk=True))
    linear = LinearAttention(
        num_key_heads=count(config, "linear_num_key_heads"),
        num_value_heads=count(config, "linear_num_value_heads"),
        key_size=count(config, "linear_key_head_dim"),
        value_size=count(config, "linear_value_head_dim"),
        kernel_size=count(config, "linear_conv_kernel_dim"),
    )
    kinds, period = layer_types(config, "linear_attention"), count(config, "full_attention_interval")
    is_linear = all_but_each(config, period) if kinds is None else [kind != "full_attention" for kind in kinds]
    experts = qwen_experts(config, normalised=switch(config, "norm_topk_prob"), shared=True)
    mixers = [linear if each else attention for each in is_linear]
    return stack(mixers, [experts] * num_layers(config), Norms(plus_one=True))


FAMILIES = {
    "qwen3_next": Family(
        _layers,
        ConfigFields(
            defaults={
                **DECODER,
                "max_position_embeddings": 32768,
                "partial_rotary_factor": 0.25,
                "num_key_value_heads": 2,
                "head_dim": 256,
                "attention_bias": False,
                "layer_types": None,
                "full_attention_interval": 4,
                "linear_conv_kernel_dim": 4,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 32,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "num_experts_per_tok": 10,
                "num_experts": 512,
                "norm_topk_prob": True,
            },
            neutral=IN_EVERY_LAYER,
        ),
    )
}
