"""The architectures that longhelix runs, and what tells them apart where a model's own config does not."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Family:
    """Models of one architecture, the `model_type` of config.json.

    attention_bias, mlp_bias: the config's switch of that name is heard. qkv_bias: queries, keys and values have biases.
    qk_norm: queries and keys are normed, head by head. head_size: the default (None: hidden size over query heads).
    grouped: num_key_value_heads must be given. slides: attention may have a sliding window, where the config's
    use_sliding_window says so, or anyway (slides_unasked); window: its default in tokens. mla, moe: attention has
    latents, FFNs have experts. vision: they read images, and the decoder's config is a part of theirs. tensors: what
    its checkpoints call tensors of a layer that most families call otherwise (`spec.weights`).
    """

    attention_bias: bool = False
    mlp_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    head_size: int | None = None
    grouped: bool = True
    slides: bool = False
    slides_unasked: bool = False
    window: int | None = None
    mla: bool = False
    moe: bool = False
    vision: bool = False
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
    "qwen2": Family(qkv_bias=True, slides=True, window=4096),
    "qwen3": Family(attention_bias=True, qk_norm=True, head_size=128, slides=True, window=4096),
    "mixtral": Family(moe=True, slides=True, slides_unasked=True, tensors=_MIXTRAL_TENSORS),
    "qwen2_moe": Family(qkv_bias=True, moe=True, slides=True, window=4096, tensors=_QWEN2_MOE_TENSORS),
    "qwen3_moe": Family(attention_bias=True, qk_norm=True, moe=True, slides=True, window=4096),
    "qwen3_vl": Family(attention_bias=True, qk_norm=True, head_size=128, vision=True),
    "qwen3_vl_moe": Family(attention_bias=True, qk_norm=True, moe=True, vision=True),
    "deepseek_v2": Family(attention_bias=True, mlp_bias=True, mla=True, moe=True),
    "deepseek_v3": Family(attention_bias=True, mla=True, moe=True),
    "kimi_k2": Family(attention_bias=True, mla=True, moe=True),
}
