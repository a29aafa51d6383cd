"""A vision-language checkpoint gives its decoder's tensors as any decoder's, and its tower's apart."""

import json

import pytest
import torch
from safetensors.torch import save_file

from longhelix.compute.models.checkpoint import TensorInfo
from longhelix.compute.models.model_files import open_checkpoint

pytestmark = pytest.mark.unit

EXPERTS, HIDDEN, COLUMNS = 3, 6, 4
LAYER = "model.language_model.layers.0."


def write(folder, tensors, architecture="qwen3_vl_moe"):
    config = {"model_type": architecture, "text_config": {"hidden_size": HIDDEN}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return open_checkpoint(str(folder))


@pytest.mark.parametrize("published", [True, False], ids=["published", "transformers"])
def test_experts_are_matrices_of_their_own(tmp_path, published):
    """Published ones have inputs before outputs."""
    gate_up_EOI, down_EOI = torch.randn(EXPERTS, 2 * COLUMNS, HIDDEN), torch.randn(EXPERTS, HIDDEN, COLUMNS)
    stored = {
        LAYER + "mlp.experts.gate_up_proj": gate_up_EOI.mT if published else gate_up_EOI,
        LAYER + "mlp.experts.down_proj": down_EOI.mT if published else down_EOI,
    }
    checkpoint = write(tmp_path, stored)
    assert len(checkpoint.tensors) == 3 * EXPERTS
    for expert in range(EXPERTS):
        matrices = {
            "gate_proj": gate_up_EOI[expert, :COLUMNS],
            "up_proj": gate_up_EOI[expert, COLUMNS:],
            "down_proj": down_EOI[expert],
        }
        for kind, matrix in matrices.items():
            name = f"model.layers.0.mlp.experts.{expert}.{kind}.weight"
            assert checkpoint.tensors[name] == TensorInfo(name, tuple(matrix.shape), "float32")
            for rows, columns in ((slice(0, len(matrix)), slice(0, matrix.shape[1])), (slice(1, 3), slice(2, 4))):
                read = checkpoint.read(name, (rows, columns))
                assert torch.equal(read, matrix[rows, columns])
                assert read.stride(1) == 1


def test_the_tower_is_apart(tmp_path):
    tensors = {
        LAYER + "self_attn.q_proj.weight": torch.randn(8, 6),
        "lm_head.weight": torch.randn(9, 6),
        "model.visual.pos_embed.weight": torch.randn(4, 5),
    }
    checkpoint = write(tmp_path, tensors, "qwen3_vl")
    assert set(checkpoint.tensors) == {"model.layers.0.self_attn.q_proj.weight", "lm_head.weight"}
    assert set(checkpoint.tower_tensors) == {"pos_embed.weight"}
    assert torch.equal(checkpoint.read_tower("pos_embed.weight"), tensors["model.visual.pos_embed.weight"])
    rows = slice(2, 5), slice(0, 6)
    assert torch.equal(
        checkpoint.read("model.layers.0.self_attn.q_proj.weight", rows), tensors[LAYER + "self_attn.q_proj.weight"][2:5]
    )
    assert [path.name for path in checkpoint.files] == ["model.safetensors"]
