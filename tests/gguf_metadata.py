"""Metadata of GGUF files of small models, as llama.cpp's converter writes them."""

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np

COMMON = {
    "block_count": 4,
    "context_length": 4096,
    "embedding_length": 256,
    "attention.head_count": 8,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1e6,
    "vocab_size": 1000,
}
GROUPED = COMMON | {"attention.head_count_kv": 2}
EXPERTS = {"expert_count": 16, "expert_used_count": 4, "expert_feed_forward_length": 96}
LATENT = COMMON | EXPERTS | {
    "feed_forward_length": 512,
    "attention.head_count_kv": 1,
    "attention.q_lora_rank": 64,
    "attention.kv_lora_rank": 48,
    "attention.key_length": 64,
    "attention.value_length": 48,
    "attention.key_length_mla": 40,
    "attention.value_length_mla": 32,
    "rope.dimension_count": 16,
    "leading_dense_block_count": 1,
    "expert_shared_count": 2,
    "expert_group_count": 4,
    "expert_group_used_count": 2,
    "expert_weights_scale": 2.5,
    "expert_gating_func": 2,
    "expert_weights_norm": True,
}  # fmt: skip
SOFTMAX = LATENT | {"expert_gating_func": 1, "expert_weights_norm": False}
BY_FAMILY = {
    "llama": ("llama", GROUPED | {"feed_forward_length": 512, "rope.dimension_count": 32}),
    "mistral": ("llama", GROUPED | {"feed_forward_length": 512, "attention.sliding_window": 64}),
    "mixtral": ("llama", GROUPED | {"feed_forward_length": 512, "expert_count": 16, "expert_used_count": 4}),
    "qwen2": ("qwen2", GROUPED | {"feed_forward_length": 512}),
    "qwen2_moe": ("qwen2moe", GROUPED | EXPERTS | {"expert_shared_feed_forward_length": 128}),
    "qwen3": ("qwen3", GROUPED | {"feed_forward_length": 512, "attention.key_length": 64}),
    "qwen3_moe": ("qwen3moe", GROUPED | EXPERTS | {"attention.key_length": 64}),
    "deepseek_v2": ("deepseek2", SOFTMAX),
    "deepseek_v3": ("deepseek2", LATENT),
}
YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 1024, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}


def metadata_of(family: str, **changes: object) -> dict[str, object]:
    architecture, keys = BY_FAMILY[family]
    keys = {f"{architecture}.{name}": value for name, value in (keys | changes).items() if value is not None}
    return {"general.architecture": architecture, "tokenizer.ggml.eos_token_id": 7} | keys


def write_metadata(path: Path, family: str, tensors: Mapping[str, np.ndarray] | None = None, **changes) -> Path:
    """Write a GGUF file with float32 tensors, if there are any."""
    writer = gguf.GGUFWriter(path, BY_FAMILY[family][0])
    for key, value in metadata_of(family, **changes).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        if type(value) in add:  # the architecture is there already
            add[type(value)](key, value)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
