"""Mixture of experts: FFNs of which a token passes through a few."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longhelix.errors import UserError
from longhelix.spec.config import count, positive, switch
from longhelix.values import shown

_TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")


@dataclass(frozen=True)
class MoE:
    """The routed FFNs of a model; every size of an FFN is its number of columns.

    The first `num_dense_layers` layers have one dense FFN, and of the model's layers so have all but every
    `layer_step`-th; all others have `num_experts` of `expert_size`, of which a token takes `experts_per_token`, and
    shared ones of `shared_size` columns together (0: none), which every token takes. `routing_bias`: a number per
    expert and layer is added where experts are chosen; `shared_gate`: the shared experts are weighted by a product of
    their own with the hidden state; `biases`: the router's product and those of the experts have biases.

    Routing: scores are the softmax, or, with `sigmoid`, the sigmoid of a product each. Of `num_groups` equal groups of
    experts the best `groups_per_token` remain: by their best score, or, with `sigmoid`, by the sum of their two best.
    Of those the best experts are taken, and weighted with their scores, which are made to sum to one (`normalised`),
    times `scale`.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int = 0
    num_dense_layers: int = 0
    routing_bias: bool = False
    shared_gate: bool = False
    sigmoid: bool = False
    normalised: bool = True
    num_groups: int = 1
    groups_per_token: int = 1
    scale: float = 1.0
    layer_step: int = 1
    biases: bool = False

    def __post_init__(self) -> None:
        if self.experts_per_token > self.num_experts:
            raise UserError(
                f"a token takes {self.experts_per_token} of {self.num_experts} experts: set num_experts_per_tok to at "
                "most the number of experts",
                "invalid_model",
            )
        if self.num_experts % self.num_groups or self.groups_per_token > self.num_groups:
            raise UserError(
                f"a token cannot take {self.groups_per_token} of {self.num_groups} equal groups of {self.num_experts} "
                "experts: correct n_group or topk_group in the model's config",
                "invalid_model",
            )
        if self.experts_per_token > self.num_experts // self.num_groups * self.groups_per_token:
            raise UserError(
                f"a token takes {self.experts_per_token} experts, but {self.groups_per_token} groups have fewer: "
                "correct topk_group in the model's config",
                "invalid_model",
            )

    @classmethod
    def from_hf_config(cls, config: Mapping[str, Any]) -> "MoE":
        """Read the config.json of a model with experts; raises UserError."""
        architecture, experts_per_token = config["model_type"], count(config, "num_experts_per_tok")
        if architecture == "mixtral":
            return cls(count(config, "num_local_experts"), experts_per_token, count(config, "intermediate_size"))
        if architecture == "gpt_oss":
            num_experts = count(config, "num_local_experts")
            return cls(num_experts, experts_per_token, count(config, "intermediate_size"), biases=True)
        if architecture in ("llama4", "llama4_text"):
            return cls._llama4(config, experts_per_token)
        expert_size = count(config, "moe_intermediate_size")
        if architecture in ("qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "qwen3_next"):
            shared_gate = architecture in ("qwen2_moe", "qwen3_next")
            return cls(
                count(config, "num_experts"),
                experts_per_token,
                expert_size,
                shared_size=count(config, "shared_expert_intermediate_size") if shared_gate else 0,
                shared_gate=shared_gate,
                normalised=architecture == "qwen3_vl_moe" or switch(config, "norm_topk_prob"),
            )
        sigmoid = architecture != "deepseek_v2"
        method = "noaux_tc" if sigmoid else _topk_method(config)
        # deepseek_v2 takes its best experts of all, unless its config says otherwise.
        grouped = sigmoid or method == "group_limited_greedy"
        num_dense_layers = min(count(config, "first_k_dense_replace", least=0), count(config, "num_hidden_layers"))
        _check_layer_types(config, num_dense_layers)
        return cls(
            count(config, "n_routed_experts"),
            experts_per_token,
            expert_size,
            shared_size=0 if config["n_shared_experts"] is None else _shared_size(config, expert_size),
            num_dense_layers=num_dense_layers,
            routing_bias=method == "noaux_tc",
            sigmoid=sigmoid,
            normalised=sigmoid and switch(config, "norm_topk_prob"),
            num_groups=count(config, "n_group") if grouped else 1,
            groups_per_token=count(config, "topk_group") if grouped else 1,
            scale=positive(config, "routed_scaling_factor"),
        )

    @classmethod
    def _llama4(cls, config: Mapping[str, Any], experts_per_token: int) -> "MoE":
        """One shared expert, as large as each of the others."""
        expert_size, layer_step = count(config, "intermediate_size"), count(config, "interleave_moe_layer_step")
        layers = list(range(layer_step - 1, count(config, "num_hidden_layers"), layer_step))
        given = config.get("moe_layers")
        if given is not None and not _equals(given, int, layers):
            raise UserError(
                f"config.json has moe_layers = {shown(given)}: longhelix plans for experts in exactly "
                f"the layers that interleave_moe_layer_step {layer_step} selects",
                "invalid_model",
            )
        return cls(
            count(config, "num_local_experts"),
            experts_per_token,
            expert_size,
            shared_size=expert_size,
            layer_step=layer_step,
            sigmoid=True,
            normalised=False,
        )


def _shared_size(config: Mapping[str, Any], expert_size: int) -> int:
    """Columns of the shared experts together."""
    return count(config, "n_shared_experts", least=0) * expert_size


def _equals(given: object, kind: type, wanted: list[Any]) -> bool:
    """Whether a value from outside, which may be anything, is a list of these items."""
    return isinstance(given, list) and all(type(item) is kind for item in given) and given == wanted


def _topk_method(config: Mapping[str, Any]) -> str | None:
    method = config["topk_method"]
    if method is not None and not (isinstance(method, str) and method in _TOPK_METHODS):
        raise UserError(
            f"topk_method in the model's settings is {shown(method)}: longhelix knows {', '.join(_TOPK_METHODS)}",
            "invalid_model",
        )
    return method


def _check_layer_types(config: Mapping[str, Any], num_dense_layers: int) -> None:
    """Refuse mlp_layer_types that first_k_dense_replace contradicts."""
    given, num_layers = config.get("mlp_layer_types"), count(config, "num_hidden_layers")
    wanted = ["dense"] * num_dense_layers + ["sparse"] * (num_layers - num_dense_layers)
    if given is not None and not _equals(given, str, wanted):
        raise UserError(
            f"config.json has mlp_layer_types = {shown(given)}: longhelix plans for experts in exactly the layers "
            f"after the first {num_dense_layers}, as first_k_dense_replace says",
            "invalid_model",
        )
