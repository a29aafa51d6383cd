"""The architectures that longhelix runs, those that it only plans for, and what tells them apart where a model's own
config does not."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

# What every family's config has, with the value that an absent key stands for.
DECODER: Mapping[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10_000.0,
    "partial_rotary_factor": None,
    "dtype": None,
    "torch_dtype": None,
    "eos_token_id": None,
}


class Neutral(NamedTuple):
    """The only values of a field that longhelix runs, and what they mean."""

    values: tuple[Any, ...]
    meaning: str


@dataclass(frozen=True)
class Family:
    """Models of one architecture, which is the `model_type` of config.json."""

    # The value that transformers gives each field that longhelix reads when config.json has no such key. Sizes that
    # every published config states have no default (`config_fields.REQUIRED`).
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Fields that may be null although their default is another value.
    nullable: frozenset[str] = frozenset()
    # Second names of fields. Where a config has both, transformers takes this one.
    aliases: Mapping[str, str] = field(default_factory=dict)
    # Fields that longhelix supports with one meaning only; it refuses other values.
    neutral: Mapping[str, Neutral] = field(default_factory=dict)
    # Fields that other families read and this one's models do not.
    ignored: frozenset[str] = frozenset()

    # The config's `attention_bias` counts; if `output_bias`, the output projection has a bias as well.
    attention_bias: bool = False
    output_bias: bool = True
    mlp_bias: bool = False  # the config's `mlp_bias` counts
    qkv_bias: bool = False  # queries, keys and values have biases
    qk_norm: bool = False  # queries and keys are normed, head by head
    qk_norm_asked: bool = False  # they are normed if the config's `use_qk_norm` says so
    sinks: bool = False  # each query head has a number that its softmax counts as one more score
    partly_rotated: bool = False  # only some channels of a head carry positions
    # Attention may have a sliding window: if the config's `use_sliding_window` says so, or always (`slides_unasked`).
    slides: bool = False
    slides_unasked: bool = False
    layered: bool = False  # the config's `layer_types` says which layers have the window
    chunked: bool = False  # the window is a chunk (`ModelSpec.chunked_attention`)
    # Without `layer_types`, each full_period-th layer attends to everything. The period, or the field that has it.
    full_period: int | str | None = None
    # Without `layer_types`, layers from `max_window_layers` on have the window. If `alternates`, every second layer
    # below `max_window_layers` has it instead, from the first one on.
    alternates: bool = False
    linear: bool = False  # layers without full attention have linear attention
    gated: bool = False  # query heads have as many channels again, which weigh their outputs
    indexed: bool = False  # attention reads the tokens that an indexer chooses
    mla: bool = False  # attention has latents
    moe: bool = False  # FFNs have experts
    vision: bool = False  # models read images, and the decoder's config is a part of theirs
    wrapped: bool = False  # the decoder's config is a part of the model's, and nothing else of it is read
    # What checkpoints call tensors of a layer that most families call otherwise (`spec.weights`).
    tensors: Mapping[str, str] = field(default_factory=dict)


_MIXTRAL_TENSORS = {
    "mlp.gate.weight": "block_sparse_moe.gate.weight",
    "mlp.experts.{}.gate_proj.weight": "block_sparse_moe.experts.{}.w1.weight",
    "mlp.experts.{}.up_proj.weight": "block_sparse_moe.experts.{}.w3.weight",
    "mlp.experts.{}.down_proj.weight": "block_sparse_moe.experts.{}.w2.weight",
}
_QWEN2_MOE_TENSORS = {
    f"mlp.shared_experts.{name}.weight": f"mlp.shared_expert.{name}.weight"
    for name in ("gate_proj", "up_proj", "down_proj")
}

_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096}
_QWEN_LAYERS = _QWEN_WINDOW | {"max_window_layers": 28, "layer_types": None}
_IN_EVERY_LAYER = {
    "decoder_sparse_step": Neutral((1,), "experts in every layer"),
    "mlp_only_layers": Neutral(([], None), "experts in every layer"),
}
_DEEPSEEK_LAYERS = {"moe_layer_freq": Neutral((1,), "experts in every layer after the first, dense ones")}
_NO_KV_HEADS = frozenset({"num_key_value_heads", "head_dim", "qk_head_dim"})  # latents have neither
_LATENTS = {"attention_bias": False, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
                  "qk_rope_head_dim": 64, "v_head_dim": 128}  # fmt: skip
_MROPE = {"rope_theta": 500_000.0}
_KV_HEADS = frozenset({"num_key_value_heads"})
_WINDOW = frozenset({"sliding_window"})
_LOCAL_EXPERTS = {"num_local_experts": "num_experts"}

_DEEPSEEK_V3 = Family(
    defaults={
        **DECODER,
        "max_position_embeddings": 4096,
        **_LATENTS,
        "eos_token_id": 1,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "rope_interleave": True,
    },
    nullable=frozenset({"q_lora_rank", "norm_topk_prob", "rope_interleave", "n_shared_experts"}),
    aliases={"num_local_experts": "n_routed_experts"},
    neutral={
        **_DEEPSEEK_LAYERS,
        "topk_method": Neutral(("noaux_tc", None), "a bias for each expert in the choice of experts"),
        "scoring_func": Neutral(("sigmoid",), "sigmoid scores"),
    },
    ignored=_NO_KV_HEADS,
    attention_bias=True,
    mla=True,
    moe=True,
)

FAMILIES = {
    "llama": Family(
        defaults={
            **DECODER,
            "max_position_embeddings": 2048,
            "num_key_value_heads": None,
            "head_dim": None,
            "attention_bias": False,
            "mlp_bias": False,
            "eos_token_id": 2,
        },
        attention_bias=True,
        mlp_bias=True,
    ),
    "mistral": Family(
        defaults={
            **DECODER,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": None,
            "sliding_window": 4096,
            "eos_token_id": 2,
        },
        nullable=_WINDOW,
        ignored=frozenset({"layer_types", "use_sliding_window"}),
        slides=True,
        slides_unasked=True,
    ),
    "qwen2": Family(
        defaults={
            **DECODER,
            "max_position_embeddings": 32768,
            **_QWEN_LAYERS,
            "num_key_value_heads": 32,
            "head_dim": None,
        },
        nullable=_KV_HEADS | _WINDOW,
        qkv_bias=True,
        slides=True,
        layered=True,
    ),
    "qwen3": Family(
        defaults={
            **DECODER,
            "max_position_embeddings": 32768,
            **_QWEN_LAYERS,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "attention_bias": False,
        },
        nullable=_KV_HEADS | _WINDOW,
        attention_bias=True,
        qk_norm=True,
        slides=True,
        layered=True,
    ),
    "mixtral": Family(
        defaults={
            **DECODER,
            "max_position_embeddings": 131072,
            "num_key_value_heads": 8,
            "head_dim": None,
            "sliding_window": None,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "eos_token_id": 2,
        },
        aliases={"num_experts": "num_local_experts"},
        ignored=frozenset({"layer_types", "use_sliding_window"}),
        moe=True,
        slides=True,
        slides_unasked=True,
        tensors=_MIXTRAL_TENSORS,
    ),
    "qwen2_moe": Family(
        defaults={
            **DECODER,
            "max_position_embeddings": 32768,
            **_QWEN_LAYERS,
            "num_key_value_heads": 16,
            "head_dim": None,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "num_experts": 60,
            "norm_topk_prob": False,
            "qkv_bias": True,
        },
        nullable=_WINDOW,
        neutral=_IN_EVERY_LAYER,
        qkv_bias=True,
        moe=True,
        slides=True,
        layered=True,
        alternates=True,
        tensors=_QWEN2_MOE_TENSORS,
    ),
    "qwen3_moe": Family(
        defaults={
            **DECODER,
            "max_position_embeddings": 32768,
            **_QWEN_WINDOW,
            "num_key_value_heads": 4,
            "head_dim": None,
            "attention_bias": False,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "norm_topk_prob": False,
        },
        nullable=_WINDOW,
        aliases=_LOCAL_EXPERTS,
        neutral=_IN_EVERY_LAYER,
        ignored=frozenset({"layer_types", "max_window_layers"}),
        attention_bias=True,
        qk_norm=True,
        moe=True,
        slides=True,
    ),
    "qwen3_vl": Family(
        defaults={
            **DECODER,
            "max_position_embeddings": 128000,
            **_MROPE,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "attention_bias": False,
        },
        nullable=_KV_HEADS,
        attention_bias=True,
        qk_norm=True,
        vision=True,
    ),
    "qwen3_vl_moe": Family(
        defaults={
            **DECODER,
            "max_position_embeddings": 128000,
            **_MROPE,
            "num_key_value_heads": 16,
            "head_dim": None,
            "attention_bias": False,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "num_experts": 60,
        },
        aliases=_LOCAL_EXPERTS,
        neutral={
            **_IN_EVERY_LAYER,
            "norm_topk_prob": Neutral((True,), "expert weights that sum to one"),
        },
        attention_bias=True,
        qk_norm=True,
        moe=True,
        vision=True,
    ),
    "deepseek_v2": Family(
        defaults={
            **DECODER,
            "max_position_embeddings": 2048,
            **_LATENTS,
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
            **_DEEPSEEK_LAYERS,
            "scoring_func": Neutral(("softmax",), "softmax scores"),
            "rope_interleave": Neutral((True,), "pairs of adjacent channels"),
        },
        ignored=_NO_KV_HEADS | {"norm_topk_prob"},  # transformers never makes the weights sum to one
        attention_bias=True,
        mlp_bias=True,
        mla=True,
        moe=True,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
}

_LLAMA4 = Family(
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
    # They change what attention computes, and none of its costs.
    ignored=frozenset({"use_qk_norm", "attn_temperature_tuning", "floor_scale", "attn_scale"}),
    attention_bias=True,
    slides=True,
    slides_unasked=True,
    layered=True,
    chunked=True,
    full_period="no_rope_layer_interval",
    moe=True,
)
# Known to the planner alone: the engine refuses them. Nothing loads their tensors, which have the names of most
# families in the table of weights, and other ones in checkpoints.
PLANNED_FAMILIES = {
    "glm4_moe": Family(
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
        attention_bias=True,
        output_bias=False,
        qk_norm_asked=True,
        partly_rotated=True,
        moe=True,
    ),
    "gpt_oss": Family(
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
        # They change what the experts compute, and none of their costs.
        ignored=frozenset({"swiglu_alpha", "swiglu_limit", "initial_context_length"}),
        attention_bias=True,
        sinks=True,
        slides=True,
        slides_unasked=True,
        layered=True,
        full_period=2,
        moe=True,
    ),
    "llama4": replace(_LLAMA4, wrapped=True),
    "llama4_text": _LLAMA4,
    "deepseek_v32": replace(
        _DEEPSEEK_V3,
        defaults={
            **_DEEPSEEK_V3.defaults,
            "max_position_embeddings": 163840,
            "index_topk": 2048,
            "index_head_dim": 128,
            "index_n_heads": 64,
            "mlp_layer_types": None,
        },
        aliases={"num_local_experts": "n_routed_experts", "num_experts": "n_routed_experts"},
        ignored=_NO_KV_HEADS | {"layer_types", "mlp_bias"},  # all layers are indexed, and no product has a bias
        indexed=True,
    ),
    "qwen3_next": Family(
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
        neutral=_IN_EVERY_LAYER,
        attention_bias=True,
        qk_norm=True,
        partly_rotated=True,
        layered=True,
        full_period="full_attention_interval",
        linear=True,
        gated=True,
        moe=True,
    ),
}
