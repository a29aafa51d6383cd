"""Parts of layers that the configs of several families describe in the same way."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from longhelix.errors import UserError
from longhelix.spec.attention import (
    GroupedQueryAttention,
    MultiHeadLatentAttention,
    Projections,
    Scores,
    Visibility,
)
from longhelix.spec.config import MOST_LAYERS, count, count_or_none, positive, switch
from longhelix.spec.family import Neutral
from longhelix.spec.ffn import MLP, Activation, Function
from longhelix.spec.layer import FFN, LayerSpec, Mixer
from longhelix.spec.layout import HeadShape
from longhelix.spec.mla import MLA
from longhelix.spec.moe import MoE, Routing
from longhelix.spec.norms import HeadNorms, Norms
from longhelix.spec.rope import RopeSettings
from longhelix.values import refused

# Fields of several families, with their defaults.
LATENTS: Mapping[str, Any] = {
    "attention_bias": False,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
QWEN_WINDOW: Mapping[str, Any] = {"use_sliding_window": False, "sliding_window": 4096}
QWEN_LAYERS: Mapping[str, Any] = {**QWEN_WINDOW, "max_window_layers": 28, "layer_types": None}
NO_KV_HEADS = frozenset({"num_key_value_heads", "head_dim", "qk_head_dim"})  # latents have neither
IN_EVERY_LAYER = {
    "decoder_sparse_step": Neutral((1,), "experts in every layer"),
    "mlp_only_layers": Neutral(([], None), "experts in every layer"),
}


def num_layers(config: Mapping[str, Any]) -> int:
    return count(config, "num_hidden_layers", most=MOST_LAYERS)


def stack(mixers: Iterable[Mixer], ffns: Iterable[FFN], norms: Norms = Norms()) -> tuple[LayerSpec, ...]:
    """Return layers of one mixer and one FFN each. Equal layers are the same object."""
    shared: dict[LayerSpec, LayerSpec] = {}
    layers = (LayerSpec((mixer,), (ffn,), norms=norms) for mixer, ffn in zip(mixers, ffns, strict=True))
    return tuple(shared.setdefault(layer, layer) for layer in layers)


def alike(config: Mapping[str, Any], mixer: Mixer, ffn: FFN) -> tuple[LayerSpec, ...]:
    """Return equal layers."""
    return (LayerSpec((mixer,), (ffn,)),) * num_layers(config)


def grouped_query(
    config: Mapping[str, Any],
    rope: RopeSettings,
    *,
    partly_rotated: bool = False,
    projections: Projections = Projections(),
    norms: HeadNorms = HeadNorms(),
    scores: Scores = Scores(),
) -> GroupedQueryAttention:
    """Read attention whose rows see everything. partly_rotated: `partial_rotary_factor` of a head carries positions."""
    num_query_heads = count(config, "num_attention_heads")
    head_size = count_or_none(config, "head_dim") or count(config, "hidden_size") // num_query_heads
    rotated_size, rope_spec = rope.of_part(head_size) if partly_rotated else (head_size, rope.of(head_size))
    return GroupedQueryAttention(
        heads=HeadShape(num_query_heads, count_or_none(config, "num_key_value_heads") or num_query_heads),
        head_size=head_size,
        rotated_size=rotated_size,
        rope=rope_spec,
        projections=projections,
        norms=norms,
        scores=scores,
    )


def latent(config: Mapping[str, Any], rope: RopeSettings) -> MultiHeadLatentAttention:
    """Read latent attention whose rows see everything."""
    latents = MLA(
        q_lora_rank=count_or_none(config, "q_lora_rank"),
        kv_lora_rank=count(config, "kv_lora_rank"),
        nope_size=count(config, "qk_nope_head_dim"),
        rope_size=count(config, "qk_rope_head_dim"),
        value_size=count(config, "v_head_dim"),
        interleaved=switch(config, "rope_interleave", True),
    )
    bias = switch(config, "attention_bias")
    return MultiHeadLatentAttention(
        heads=HeadShape(count(config, "num_attention_heads"), 1),
        latents=latents,
        rope=rope.of(latents.rope_size),
        qkv_bias=bias,
        output_bias=bias,
    )


def biases(config: Mapping[str, Any]) -> Projections:
    """Read whether all projections of attention have biases."""
    bias = switch(config, "attention_bias")
    return Projections(qkv_bias=bias, output_bias=bias)


def dense(config: Mapping[str, Any], *, bias: bool = False, activation: Activation = Activation()) -> MLP:
    return MLP(count(config, "intermediate_size"), bias, activation)


# Names of functions in configs.
_FUNCTIONS: Mapping[str, Function] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu_squared",
}


def activation(config: Mapping[str, Any], key: str, *, gated: bool = True) -> Activation:
    """Read the activation of dense FFNs."""
    name = config.get(key)
    if not isinstance(name, str) or name not in _FUNCTIONS:
        allowed = f"one of {', '.join(_FUNCTIONS)}"
        raise refused(f"{key} in the model's settings", name, allowed, "invalid_model")
    return Activation(_FUNCTIONS[name], gated)


def limited(
    attention: GroupedQueryAttention, visibility: Visibility, has_limit: Iterable[bool]
) -> list[GroupedQueryAttention]:
    """Return attention for each layer: with this visibility where the layer has a limit, and as it is elsewhere."""
    other = msgspec.structs.replace(attention, visibility=visibility)
    return [other if has else attention for has in has_limit]


def always_windowed(config: Mapping[str, Any], attention: GroupedQueryAttention) -> GroupedQueryAttention:
    """Return attention with the window of `sliding_window`, if there is one."""
    window = Visibility(window_tokens=count_or_none(config, "sliding_window"))
    return msgspec.structs.replace(attention, visibility=window)


def qwen_windowed(
    config: Mapping[str, Any], attention: GroupedQueryAttention, by_default: Sequence[bool]
) -> list[GroupedQueryAttention]:
    """Return attention for each layer, with a window where `layer_types` has one.

    Args:
        by_default: whether each layer has a window if there is no `layer_types`.
    """
    kinds = layer_types(config, "sliding_attention")
    window = count_or_none(config, "sliding_window") if switch(config, "use_sliding_window") else None
    if window is None and kinds is not None and "sliding_attention" in kinds:
        raise UserError(
            "config.json has layers with sliding_attention in layer_types, but no window: set use_sliding_window to "
            "true and sliding_window to its size in tokens, or leave layer_types out",
            "invalid_model",
        )
    has_window = by_default if kinds is None else [kind != "full_attention" for kind in kinds]
    return limited(attention, Visibility(window_tokens=window), has_window)


def windowed_from(config: Mapping[str, Any]) -> list[bool]:
    """Whether each layer has a window: from `max_window_layers` on."""
    bound = count(config, "max_window_layers", least=0)
    return [layer >= bound for layer in range(num_layers(config))]


def all_but_each(config: Mapping[str, Any], period: int) -> list[bool]:
    """True for all layers but each `period`-th."""
    return [(layer + 1) % period != 0 for layer in range(num_layers(config))]


def has_windows(config: Mapping[str, Any], period: int) -> list[bool]:
    """Whether each layer has a window: as `layer_types` says, or else all but each `period`-th."""
    kinds = layer_types(config, "sliding_attention")
    return all_but_each(config, period) if kinds is None else [kind != "full_attention" for kind in kinds]


def layer_types(config: Mapping[str, Any], other: str) -> list[str] | None:
    """Read what each layer attends to: full_attention, or `other`. None where nothing is said of it."""
    given, total = config.get("layer_types"), num_layers(config)
    if given is None:
        return None
    names = {"full_attention": "full_attention", "attention": "full_attention", other: other}
    known = isinstance(given, (list, tuple)) and all(isinstance(kind, str) and kind in names for kind in given)
    if not known or len(given) != total:
        allowed = f"a list of {total} names, one for each layer: full_attention or {other}"
        raise refused("layer_types in the model's settings", given, allowed, "invalid_model")
    return [names[kind] for kind in given]


def qwen_experts(config: Mapping[str, Any], *, normalised: bool, shared: bool = False) -> MoE:
    """Read experts with softmax scores. shared: there is a shared expert, with a gate of its own."""
    return MoE(
        count(config, "num_experts"),
        count(config, "num_experts_per_tok"),
        count(config, "moe_intermediate_size"),
        shared_size=count(config, "shared_expert_intermediate_size") if shared else 0,
        routing=Routing(shared_gate=shared, normalised=normalised),
    )


def sigmoid_experts(config: Mapping[str, Any]) -> MoE:
    """Read experts with sigmoid scores, which are chosen with a bias in the best groups."""
    return MoE(
        count(config, "n_routed_experts"),
        count(config, "num_experts_per_tok"),
        expert_size := count(config, "moe_intermediate_size"),
        shared_size=shared_size(config, expert_size),
        routing=Routing(
            bias=True,
            sigmoid=True,
            normalised=switch(config, "norm_topk_prob"),
            num_groups=count(config, "n_group"),
            groups_per_token=count(config, "topk_group"),
            scale=positive(config, "routed_scaling_factor"),
        ),
    )


def shared_size(config: Mapping[str, Any], expert_size: int) -> int:
    """Columns of the shared experts together."""
    return 0 if config["n_shared_experts"] is None else count(config, "n_shared_experts", least=0) * expert_size


def after_dense(config: Mapping[str, Any], dense_ffn: MLP, experts: MoE) -> list[FFN]:
    """Return FFNs for each layer: dense ones in the first layers, as `first_k_dense_replace` says."""
    total = num_layers(config)
    num_dense = min(count(config, "first_k_dense_replace", least=0), total)
    return [*[dense_ffn] * num_dense, *[experts] * (total - num_dense)]
