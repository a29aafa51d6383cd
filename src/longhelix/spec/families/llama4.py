"""Llama 4: layers with chunked attention between layers without positions that see everything; experts in some."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from longhelix.errors import UserError
from longhelix.spec.attention import GroupedQueryAttention, Scores, Visibility
from longhelix.spec.config import count, count_or_none, equals, switch
from longhelix.spec.config_parts import all_but_each, biases, grouped_query, layer_types, num_layers, stack
from longhelix.spec.family import DECODER, ConfigFields, Family
from longhelix.spec.ffn import MLP
from longhelix.spec.layer import FFN, LayerSpec
from longhelix.spec.moe import MoE, Routing
from longhelix.spec.norms import HeadNorms
from longhelix.spec.rope import RopeSettings
from longhelix.spec.vision import decoder_config
from longhelix.values import refused, shown


def _layers(config: Mapping[str, Any], rope: RopeSettings) -> tuple[LayerSpec, ...]:
    return stack(_mixers(config, rope), _ffns(config))


def _mixers(config: Mapping[str, Any], rope: RopeSettings) -> list[GroupedQueryAttention]:
    attention = grouped_query(config, rope, projections=biases(config))
    chunk = Visibility(chunk_tokens=count_or_none(config, "attention_chunk_size"))
    l2_norm, tuning = switch(config, "use_qk_norm"), switch(config, "attn_temperature_tuning")
    rotates, kinds = _rotates(config), layer_types(config, "chunked_attention")
    has_chunks = rotates if kinds is None else [kind != "full_attention" for kind in kinds]
    return [
        msgspec.structs.replace(
            attention,
            rotated_size=attention.rotated_size if turns else 0,
            visibility=chunk if has else attention.visibility,
            norms=HeadNorms(l2=l2_norm and turns),
            scores=Scores(temperature_tuning=tuning and not turns),
        )
        for turns, has in zip(rotates, has_chunks, strict=True)
    ]


def _rotates(config: Mapping[str, Any]) -> list[bool]:
    """Whether each layer has positions: as `no_rope_layers` says, where 1 means yes, or all but each n-th layer."""
    flags = _flags(config, "no_rope_layers", num_layers(config))
    if flags:
        return [flag == 1 for flag in flags[: num_layers(config)]]
    return all_but_each(config, count(config, "no_rope_layer_interval"))


def _flags(config: Mapping[str, Any], key: str, least: int) -> Sequence[int]:
    """Read a list of `least` or more numbers that are 0 or 1. Null and an empty list mean none."""
    flags: Any = config.get(key)
    if flags is None:
        return ()
    if (
        not isinstance(flags, (list, tuple))
        or not all(type(flag) is int and flag in (0, 1) for flag in flags)
        or 0 < len(flags) < least
    ):
        allowed = f"a list of {least} or more numbers, one for each layer: 0 or 1"
        raise refused(f"{key} in the model's settings", flags, allowed, "invalid_model")
    return flags


def _ffns(config: Mapping[str, Any]) -> list[FFN]:
    """Return FFNs for each layer: experts in each n-th, with one shared expert that is as large as each of them."""
    size, total = count(config, "intermediate_size"), num_layers(config)
    step = count(config, "interleave_moe_layer_step")
    layers = list(range(step - 1, total, step))
    given = config.get("moe_layers")
    if given is not None and not equals(given, int, layers):
        raise UserError(
            f"config.json has moe_layers = {shown(given)}: longhelix plans for experts in exactly "
            f"the layers that interleave_moe_layer_step {step} selects",
            "invalid_model",
        )
    experts = MoE(
        count(config, "num_local_experts"),
        count(config, "num_experts_per_tok"),
        size,
        shared_size=size,
        routing=Routing(sigmoid=True, normalised=False, weighted_inputs=True),
    )
    dense = MLP(count(config, "intermediate_size_mlp"))
    return [experts if (layer + 1) % step == 0 else dense for layer in range(total)]


_TEXT = Family(
    _layers,
    ConfigFields(
        defaults={
            **DECODER,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size_mlp": 16384,
            "attention_bias": False,
            "attention_chunk_size": 8192,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "layer_types": None,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "moe_layers": None,
            "interleave_moe_layer_step": 1,
            "num_experts_per_tok": 1,
            "num_local_experts": 16,
            "eos_token_id": 2,
        },
        nullable=frozenset({"attention_chunk_size"}),
        # They are parts of the temperature, which the engine does not compute yet.
        ignored=frozenset({"floor_scale", "attn_scale"}),
    ),
)
FAMILIES = {"llama4": replace(_TEXT, decoder=decoder_config), "llama4_text": _TEXT}
