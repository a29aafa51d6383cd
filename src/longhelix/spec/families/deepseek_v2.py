"""DeepSeek-V2: latent attention, and experts with softmax scores."""

from collections.abc import Mapping
from typing import Any

from longhelix.errors import UserError
from longhelix.spec.config import count, positive, switch
from longhelix.spec.config_parts import LATENTS, NO_KV_HEADS, after_dense, dense, latent, num_layers, shared_size, stack
from longhelix.spec.family import DECODER, ConfigFields, Family, Neutral
from longhelix.spec.gguf import GgufForm, GgufMetadata, both_scales, latent_expert_settings
from longhelix.spec.layer import LayerSpec
from longhelix.spec.moe import MoE, Routing
from longhelix.spec.rope import RopeSettings
from longhelix.values import shown

_TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")


def _layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    bias = switch(config, "mlp_bias")
    ffns = after_dense(config, dense(config, bias=bias), _experts(config, bias))
    return stack([latent(config, rope)] * num_layers(config), ffns)


def _experts(config: Mapping[str, Any], bias: bool) -> MoE:
    """Read the experts. A token takes the best ones of all groups, unless `topk_method` says otherwise."""
    method = _topk_method(config)
    grouped = method == "group_limited_greedy"
    return MoE(
        count(config, "n_routed_experts"),
        count(config, "num_experts_per_tok"),
        expert_size := count(config, "moe_intermediate_size"),
        shared_size=shared_size(config, expert_size),
        shared_bias=bias,
        routing=Routing(
            bias=method == "noaux_tc",
            normalised=False,
            num_groups=count(config, "n_group") if grouped else 1,
            groups_per_token=count(config, "topk_group") if grouped else 1,
            scale=positive(config, "routed_scaling_factor"),
        ),
    )


def _topk_method(config: Mapping[str, Any]) -> str | None:
    method: str | None = config["topk_method"]
    if method is not None and not (isinstance(method, str) and method in _TOPK_METHODS):
        raise UserError(
            f"topk_method in the model's settings is {shown(method)}: longhelix knows {', '.join(_TOPK_METHODS)}",
            "invalid_model",
        )
    return method


def _gguf_settings(metadata: GgufMetadata) -> dict[str, Any]:
    settings = latent_expert_settings(metadata)
    return settings | {"topk_method": "group_limited_greedy" if settings["n_group"] > 1 else "greedy"}


def has_sigmoid(metadata: GgufMetadata) -> bool:
    """Return whether a GGUF file is of DeepSeek-V3, whose scores are a sigmoid. Both have the same architecture."""
    function = metadata.get("expert_gating_func")
    return isinstance(function, int) and function == 2


FAMILIES = {
    "deepseek_v2": Family(
        _layers,
        ConfigFields(
            defaults={
                **DECODER,
                "max_position_embeddings": 2048,
                **LATENTS,
                "eos_token_id": 2,
                "mlp_bias": False,
                "moe_intermediate_size": 1407,
                "n_shared_experts": 2,
                "n_routed_experts": 64,
                "routed_scaling_factor": 1.0,
                "n_group": None,
                "topk_group": None,
                "topk_method": "greedy",
                "num_experts_per_tok": None,
                "first_k_dense_replace": 0,
            },
            nullable=frozenset({"q_lora_rank", "n_shared_experts", "topk_method"}),
            aliases={"num_experts": "n_routed_experts"},
            neutral={
                "moe_layer_freq": Neutral((1,), "experts in every layer after the first, dense ones"),
                "scoring_func": Neutral(("softmax",), "softmax scores"),
                "rope_interleave": Neutral((True,), "pairs of adjacent channels"),
            },
            ignored=NO_KV_HEADS | {"norm_topk_prob"},
        ),  # transformers never makes the weights sum to one
        gguf=GgufForm(
            "deepseek2",
            _gguf_settings,
            matches=lambda metadata: not has_sigmoid(metadata),
            neutral={
                "expert_gating_func": Neutral((1, 0), "softmax scores"),
                "expert_weights_norm": Neutral((False,), "weights of experts that do not sum to one"),
            },
            log_multiplier=both_scales,
        ),
    )
}
