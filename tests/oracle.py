"""Tiny random models, and what transformers says about them."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

VOCAB, NEW_TOKENS = 199, 16
# Short ones leave shards empty; the longest goes round six ranks of 4-token blocks more than twice.
PROMPT_LENGTHS = (1, 3, 18, 41)
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 90,
    "intermediate_size": 77,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(
        num_attention_heads=9, num_key_value_heads=3, head_dim=16, tie_word_embeddings=True, **_COMMON
    ),
    "llama-bias": LlamaConfig(
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=16,
        attention_bias=True,
        mlp_bias=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        **_COMMON,
    ),
    "mistral": MistralConfig(num_attention_heads=14, num_key_value_heads=2, head_dim=16, sliding_window=10, **_COMMON),
    "qwen2": Qwen2Config(  # the second layer has a window
        num_attention_heads=7,
        num_key_value_heads=1,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=1,
        **(_COMMON | {"hidden_size": 84}),
    ),
    "qwen3": Qwen3Config(num_attention_heads=6, num_key_value_heads=2, head_dim=16, **_COMMON),
    "granite": GraniteConfig(
        num_attention_heads=6,
        num_key_value_heads=2,
        attention_bias=True,
        mlp_bias=True,
        attention_multiplier=0.15,
        residual_multiplier=0.4,
        embedding_multiplier=6.0,
        logits_scaling=3.0,
        **(_COMMON | {"hidden_size": 96}),
    ),
    "gemma2": Gemma2Config(  # the first layer has a window
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=10,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=20.0,
        tie_word_embeddings=False,
        **_COMMON,
    ),
    "gemma3": Gemma3TextConfig(  # the first layer has a window and its own rotation
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=10,
        sliding_window_pattern=2,
        query_pre_attn_scalar=24,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
        },
        tie_word_embeddings=False,
        **_COMMON,
    ),
    "arcee": ArceeConfig(num_attention_heads=9, num_key_value_heads=3, head_dim=16, mlp_bias=True, **_COMMON),
    "exaone4": Exaone4Config(  # the second layer has no positions
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=10,
        sliding_window_pattern=2,
        **_COMMON,
    ),
}
_EXPERTS = {"moe_intermediate_size": 23, "num_experts_per_tok": 2}
_LATENT = {
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    **_EXPERTS,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
WITH_EXPERTS: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, num_local_experts=5, num_experts_per_tok=2,
        sliding_window=None, **_COMMON,
    ),
    "qwen3_moe": Qwen3MoeConfig(
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, num_experts=6, norm_topk_prob=True, **_EXPERTS,
        **_COMMON,
    ),
    "qwen2_moe": Qwen2MoeConfig(
        num_attention_heads=6, num_key_value_heads=2, num_experts=6, shared_expert_intermediate_size=31, **_EXPERTS,
        **(_COMMON | {"hidden_size": 96}),
    ),
    "deepseek_v2": DeepseekV2Config(
        q_lora_rank=None, n_routed_experts=8, topk_method="group_limited_greedy", n_group=4, topk_group=2,
        routed_scaling_factor=1.5, **_LATENT, **_COMMON,
    ),
    "deepseek_v3": DeepseekV3Config(
        q_lora_rank=20, n_routed_experts=8, n_group=4, topk_group=2, routed_scaling_factor=2.5,
        rope_parameters=_YARN, **_LATENT, **_COMMON,
    ),
    "glm4_moe": Glm4MoeConfig(  # half of each head is rotated
        num_attention_heads=6, num_key_value_heads=2, head_dim=16, attention_bias=True, use_qk_norm=True,
        n_routed_experts=8, n_shared_experts=2, n_group=4, topk_group=2, routed_scaling_factor=2.5,
        first_k_dense_replace=1, **_EXPERTS, **_COMMON,
    ),
}  # fmt: skip
_SIXTEENS = _COMMON | {"hidden_size": 144, "intermediate_size": 192}
NATIVE_SIZES = LlamaConfig(num_attention_heads=9, num_key_value_heads=3, head_dim=16, **_SIXTEENS)
# Experts that the packed kernels take, split over six ranks as well.
_EXPERT_SIXTEENS = _SIXTEENS | {"num_attention_heads": 6, "num_key_value_heads": 2, "num_experts_per_tok": 2}
NATIVE_EXPERTS: dict[str, PreTrainedConfig] = {
    "native-mixtral": MixtralConfig(num_local_experts=5, head_dim=16, sliding_window=20, **_EXPERT_SIXTEENS),
    "native-qwen3_moe": Qwen3MoeConfig(
        num_experts=6, norm_topk_prob=True, head_dim=16, moe_intermediate_size=96, **_EXPERT_SIXTEENS
    ),
    "native-qwen2_moe": Qwen2MoeConfig(
        num_experts=6, moe_intermediate_size=96, shared_expert_intermediate_size=192,
        **(_EXPERT_SIXTEENS | {"hidden_size": 96}),
    ),
}  # fmt: skip
NATIVE_LATENTS = DeepseekV3Config(
    q_lora_rank=16, n_routed_experts=4, n_group=2, topk_group=1,
    **(_LATENT | {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 16}), **_SIXTEENS,
)  # fmt: skip
# Over two ranks: one has no row of Wo; one has 17 columns, which cannot be packed, and one 16.
UNEVEN: dict[str, PreTrainedConfig] = {
    "one-head": LlamaConfig(num_attention_heads=1, num_key_value_heads=1, head_dim=32, **_SIXTEENS),
    "33-columns": LlamaConfig(
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, **(_SIXTEENS | {"intermediate_size": 33})
    ),
}
SINGLE_HEAD = LlamaConfig(num_attention_heads=1, num_key_value_heads=1, head_dim=32, **_COMMON)


@dataclass(frozen=True)
class Oracle:
    """A saved model, prompts, and transformers' greedy tokens and logits at every position (prompt and output)."""

    path: Path
    prompts: list[list[int]]
    tokens: list[list[int]]
    logits: list[np.ndarray]


def make_oracle(config, folder, seed=0, prompt_lengths=PROMPT_LENGTHS, new_tokens=NEW_TOKENS):
    torch.manual_seed(seed)
    forms = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **forms).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):  # ones and zeros would hide a missing factor
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    for name, bias in model.named_buffers():  # what DeepSeek-V3 adds where experts are chosen
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(bias, std=0.2)
    model.save_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in prompt_lengths]
    tokens, logits = zip(*(greedy(model, prompt, new_tokens) for prompt in prompts), strict=True)
    return Oracle(Path(folder), prompts, list(tokens), list(logits))


def greedy(model, prompt, new_tokens=NEW_TOKENS):
    """Greedy tokens, each from a whole forward pass without cache, and the logits of all positions that were fed."""
    return greedy_of(lambda ids: model(torch.tensor([ids]), use_cache=False).logits[0], prompt, new_tokens)


@torch.no_grad()
def greedy_of(logits, prompt, new_tokens):
    """The same by a function from ids to logits_SV."""
    ids = list(prompt)
    for _ in range(new_tokens):
        logits_SV = logits(ids)
        ids.append(int(logits_SV[-1].argmax()))
    return ids[len(prompt) :], logits_SV.numpy()


def save_tokenizer_files(folder):
    """The least that a folder needs to be served: a word-level tokenizer over the toy vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(Path(folder) / "tokenizer.json"))
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps({}))
