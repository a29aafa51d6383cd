"""The architectures that longhelix runs, those that it plans for alone, and what tells them apart where a model's own
config does not."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Family:
    """Models of one architecture, the `model_type` of config.json.

    attention_bias, mlp_bias: the config's switch of that name is heard; output_bias: the former is also of the output
    projection. qkv_bias: queries, keys and values have biases. qk_norm: queries and keys are normed, head by head, or
    (qk_norm_asked) where the config's use_qk_norm says so. sinks: every query head has a number that its softmax
    counts as one more score. head_size: the default (None: hidden size over query heads). grouped: num_key_value_heads
    must be given. partly_rotated: only a part of a head's channels carries positions. slides: attention may have a
    sliding window, where the config's use_sliding_window says so, or anyway (slides_unasked); window: its default in
    tokens; chunked: it is a chunk (`ModelSpec.chunked_attention`). Where the config says nothing of layers, all have
    it, or all but the first (full_first: the default of max_window_layers), or all but each full_period-th. linear: in
    place of a window these have linear attention, and the config's full_attention_interval says which do not. gated:
    query heads have as many channels again, which weigh their outputs. mla, moe: attention has latents, FFNs have
    experts. indexed: attention reads what an indexer chooses. vision: they read images, and the decoder's config is a
    part of theirs; wrapped: it is, and nothing else of it is read.
    tensors: what its checkpoints call tensors of a layer that most families call otherwise (`spec.weights`).
    """

    attention_bias: bool = False
    output_bias: bool = True
    mlp_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    qk_norm_asked: bool = False
    sinks: bool = False
    head_size: int | None = None
    grouped: bool = True
    partly_rotated: bool = False
    slides: bool = False
    slides_unasked: bool = False
    window: int | None = None
    chunked: bool = False
    full_first: int | None = None
    full_period: int | None = None
    linear: bool = False
    gated: bool = False
    indexed: bool = False
    mla: bool = False
    moe: bool = False
    vision: bool = False
    wrapped: bool = False
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

FAMILIES = {
    "llama": Family(attention_bias=True, mlp_bias=True, grouped=False),
    "mistral": Family(slides=True, slides_unasked=True, window=4096),
    "qwen2": Family(qkv_bias=True, slides=True, window=4096, full_first=28),
    "qwen3": Family(attention_bias=True, qk_norm=True, head_size=128, slides=True, window=4096, full_first=28),
    "mixtral": Family(moe=True, slides=True, slides_unasked=True, tensors=_MIXTRAL_TENSORS),
    "qwen2_moe": Family(qkv_bias=True, moe=True, slides=True, window=4096, tensors=_QWEN2_MOE_TENSORS),
    "qwen3_moe": Family(attention_bias=True, qk_norm=True, moe=True, slides=True, window=4096),
    "qwen3_vl": Family(attention_bias=True, qk_norm=True, head_size=128, vision=True),
    "qwen3_vl_moe": Family(attention_bias=True, qk_norm=True, moe=True, vision=True),
    "deepseek_v2": Family(attention_bias=True, mlp_bias=True, mla=True, moe=True),
    "deepseek_v3": Family(attention_bias=True, mla=True, moe=True),
    "kimi_k2": Family(attention_bias=True, mla=True, moe=True),
}

_LLAMA4 = Family(
    attention_bias=True,
    head_size=128,
    slides=True,
    slides_unasked=True,
    window=8192,
    full_period=4,
    chunked=True,
    moe=True,
)
# Known to the planner alone: the engine refuses them. Nothing loads their tensors, which have the names of most
# families in the table of weights, and other ones in checkpoints.
PLANNED_FAMILIES = {
    "glm4_moe": Family(attention_bias=True, output_bias=False, qk_norm_asked=True, partly_rotated=True, moe=True),
    "gpt_oss": Family(
        attention_bias=True,
        sinks=True,
        head_size=64,
        slides=True,
        slides_unasked=True,
        window=128,
        full_period=2,
        moe=True,
    ),
    "llama4": replace(_LLAMA4, wrapped=True),
    "llama4_text": _LLAMA4,
    "deepseek_v32": Family(attention_bias=True, indexed=True, mla=True, moe=True),
    "qwen3_next": Family(
        attention_bias=True,
        qk_norm=True,
        head_size=256,
        partly_rotated=True,
        full_period=4,
        linear=True,
        gated=True,
        moe=True,
    ),
}
