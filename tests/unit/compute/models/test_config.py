"""Models that the engine does not run, refused before their weights are looked at."""

import json

import pytest
import torch
from safetensors.torch import save_file

from longhelix.compute.models.model_files import open_checkpoint
from longhelix.engine.resolution import resolve
from longhelix.errors import UserError
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model

pytestmark = pytest.mark.unit

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "vocab_size": 8,
    "max_position_embeddings": 32,
}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def refused(folder, config, code: str, *words: str) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"norm": torch.ones(8)}, folder / "model.safetensors")
    with pytest.raises(UserError) as caught:
        resolve(open_checkpoint(str(folder)), Layout())
    assert caught.value.code == code
    for word in words:
        assert word in str(caught.value)


def test_a_checkpoint_that_is_not_read_can_be_planned_for(tmp_path):
    refused(tmp_path, MIXTRAL | {"quantization_config": {"quant_method": "fp8"}}, "invalid_checkpoint", "no tensor")
    assert load_model(str(tmp_path)).moes


def test_biases_beside_experts_are_refused(tmp_path):
    config = MIXTRAL | {"model_type": "deepseek_v2", "mlp_bias": True, "n_routed_experts": 8, "kv_lora_rank": 8}
    config |= {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 8}
    refused(tmp_path, config, "invalid_argument", "mlp_bias")


def test_a_quantised_checkpoint_that_is_not_read_is_refused(tmp_path):
    quantised = LLAMA | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    refused(tmp_path, quantised, "invalid_model", "quantised with quant_method 'bitsandbytes'", "compressed-tensors")
    refused(tmp_path, LLAMA, "invalid_checkpoint", "no tensor")
