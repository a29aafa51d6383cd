"""GLM-4.5: grouped-query attention with partly rotated heads, and experts as DeepSeek-V3 has them."""

from collections.abc import Mapping
from typing import Any

from longhelix.spec.attention import Projections
from longhelix.spec.config import switch
from longhelix.spec.config_parts import after_dense, dense, grouped_query, num_layers, sigmoid_experts, stack
from longhelix.spec.family import DECODER, ConfigFields, Family
from longhelix.spec.layer import LayerSpec
from longhelix.spec.norms import HeadNorms
from longhelix.spec.rope import RopeSettings


def _layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    attention = grouped_query(
        config,
        rope,
        partly_rotated=True,
        projections=Projections(qkv_bias=switch(config, "attention_bias")),
        norms=HeadNorms(qk=switch(config, "use_qk_norm")),
    )
    ffns = after_dense(config, dense(config), sigmoid_experts(config))
    return stack([attention] * num_layers(config), ffns)


FAMILIES = {
    "glm4_moe": Family(
        _layers,
        ConfigFields(
            defaults={
                **DECODER,
                "max_position_embeddings": 131072,
                "rms_norm_eps": 1e-5,
                "partial_rotary_factor": 0.5,
                "num_key_value_heads": 8,
                "head_dim": None,
                "attention_bias": False,
                "moe_intermediate_size": 1408,
                "num_experts_per_tok": 8,
                "n_shared_experts": 1,
                "n_routed_experts": 128,
                "routed_scaling_factor": 1.0,
                "n_group": 1,
                "topk_group": 1,
                "first_k_dense_replace": 1,
                "norm_topk_prob": True,
                "use_qk_norm": False,
            },
            aliases={"num_local_experts": "n_routed_experts"},
        ),
    )
}
