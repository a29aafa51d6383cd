"""DeepSeek-V3.2: DeepSeek-V3 with an indexer, which chooses the tokens that attention reads."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from longhelix.errors import UserError
from longhelix.spec.attention import Visibility
from longhelix.spec.config import count, equals
from longhelix.spec.config_parts import NO_KV_HEADS, after_dense, dense, latent, num_layers, sigmoid_experts, stack
from longhelix.spec.families.deepseek_v3 import DEEPSEEK_V3
from longhelix.spec.layer import FFN, LayerSpec
from longhelix.spec.moe import MoE
from longhelix.spec.rope import RopeSettings
from longhelix.spec.sparse import Indexer
from longhelix.values import shown


def _layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    indexer = Indexer(count(config, "index_n_heads"), count(config, "index_head_dim"), count(config, "index_topk"))
    attention = msgspec.structs.replace(latent(config, rope), visibility=Visibility(indexer=indexer))
    ffns = after_dense(config, dense(config), sigmoid_experts(config))
    _check_layer_types(config, ffns)
    return stack([attention] * num_layers(config), ffns)


def _check_layer_types(config: Mapping[str, Any], ffns: list[FFN]) -> None:
    """Refuse mlp_layer_types that first_k_dense_replace contradicts."""
    given = config.get("mlp_layer_types")
    wanted = ["sparse" if isinstance(ffn, MoE) else "dense" for ffn in ffns]
    if given is not None and not equals(given, str, wanted):
        num_dense = sum(not isinstance(ffn, MoE) for ffn in ffns)
        raise UserError(
            f"config.json has mlp_layer_types = {shown(given)}: longhelix plans for experts in exactly the layers "
            f"after the first {num_dense}, as first_k_dense_replace says",
            "invalid_model",
        )


FAMILIES = {
    "deepseek_v32": replace(
        DEEPSEEK_V3,
        layers=_layers,
        fields=replace(
            DEEPSEEK_V3.fields,
            defaults={
                **DEEPSEEK_V3.fields.defaults,
                "max_position_embeddings": 163840,
                "index_topk": 2048,
                "index_head_dim": 128,
                "index_n_heads": 64,
                "mlp_layer_types": None,
            },
            nullable=frozenset({"n_shared_experts"}),
            aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
            ignored=NO_KV_HEADS | {"layer_types", "mlp_bias"},  # all layers are indexed, and no product has a bias
        ),
    )
}
