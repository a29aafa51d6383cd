"""Names under which models are published, and tensors that are one."""

import json

import pytest
import torch
from safetensors.torch import save_file

from longhelix.compute.models.model_files import open_checkpoint
from longhelix.errors import UserError
from longhelix.spec.tensor_names import canonical

NAMES = ("layers.0.self_attn.q_proj.weight", "layers.61.embed_tokens.weight", "norm.weight", "embed_tokens.weight")


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "model.",
        "module.model.",
        "_orig_mod.model.",
        "base_model.model.model.",
        "model.language_model.",
        "language_model.model.",
        "language_model.",
        "model.text_model.",
    ],
)
def test_decoders_under_all_prefixes_are_the_same(prefix):
    for name in NAMES:
        assert canonical(prefix + name) == "model." + name
    for head in ("lm_head.weight", "lm_head.bias"):
        assert canonical(prefix + head) == head


def test_layers_may_be_compiled_one_by_one():
    assert canonical("model.layers.0._orig_mod.mlp.up_proj.weight") == "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize("prefix", ["", "model.", "module.model."])
def test_towers_are_the_same(prefix):
    assert canonical(prefix + "visual.merger.norm.bias") == "model.visual.merger.norm.bias"


@pytest.mark.parametrize(
    "name",
    ["encoder.layers.0.norm.weight", "mtp.layers.0.norm.weight", "normal.weight", "v_head.weight", "model.layers", ""],
)
def test_other_names_stay(name):
    assert canonical(name) == name


def write(folder, tensors, config=None):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | (config or {})))
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(str(folder))


def test_tensors_are_read_under_their_canonical_names(tmp_path):
    stored = {"embed_tokens.weight": torch.randn(5, 4), "_orig_mod.model.norm.weight": torch.randn(4)}
    checkpoint = write(tmp_path, stored)
    assert {name: info.name for name, info in checkpoint.tensors.items()} == {
        "model.embed_tokens.weight": "model.embed_tokens.weight",
        "model.norm.weight": "model.norm.weight",
    }
    read = checkpoint.read("model.embed_tokens.weight", (slice(1, 4), slice(2, 4)))
    assert torch.equal(read, stored["embed_tokens.weight"][1:4, 2:4])


def test_two_names_of_one_tensor_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"'(model\.)?norm\.weight' and '(model\.)?norm\.weight'") as refusal:
        write(tmp_path, {"norm.weight": torch.zeros(4), "model.norm.weight": torch.ones(4)})
    assert refusal.value.code == "invalid_checkpoint"


def test_a_stale_index_beside_a_whole_file_is_not_read(tmp_path):
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00009.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(write(tmp_path, {"model.norm.weight": torch.zeros(4)}).tensors) == {"model.norm.weight"}


@pytest.mark.parametrize("ties", [True, False, None])
def test_a_head_is_the_embedding_where_there_is_none_and_the_config_ties_them(tmp_path, ties):
    config = {} if ties is None else {"tie_word_embeddings": ties}
    checkpoint = write(tmp_path, {"lm_head.weight": torch.arange(20.0).view(5, 4)}, config)
    assert ("model.embed_tokens.weight" in checkpoint.tensors) == (ties is True)
    if ties:
        assert checkpoint.holds_same("model.embed_tokens.weight", "lm_head.weight")
        assert checkpoint.read("model.embed_tokens.weight", (slice(1, 2), slice(0, 4))).tolist() == [[4, 5, 6, 7]]


def test_tensors_are_the_same_bit_for_bit(tmp_path, monkeypatch):
    monkeypatch.setattr("longhelix.compute.models.safetensors_checkpoint._COMPARED_BYTES", 8)
    first = torch.arange(20.0).view(5, 4)
    last = first.clone()
    last[-1, -1] += 1
    stored = {"a": first, "same": first.clone(), "last": last, "shape": first.view(4, 5), "dtype": first.bfloat16()}
    stored = {name: tensor.clone() for name, tensor in stored.items()}
    checkpoint = write(tmp_path, stored)
    assert [name for name in stored if checkpoint.holds_same("a", name)] == ["a", "same"]
