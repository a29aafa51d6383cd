"""Checkpoints as they are published, which differ from what transformers writes: tokens equal those of transformers."""

import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from shown import VISION_LANGUAGE, make_shown_oracle
from transformers import AutoModelForCausalLM

from longhelix import LLM, ImagePrompt, Layout, SamplingParams, UserError
from oracle import FAMILIES, greedy, make_oracle, save_tokenizer_files

pytestmark = pytest.mark.dist

PROMPT, NEW_TOKENS = [5, 7, 11, 13, 17], 12


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Its config ties the head to the embedding."""
    made = make_oracle(FAMILIES["llama"], tmp_path_factory.mktemp("llama"))
    save_tokenizer_files(made.path)
    return made.path


def changed(path, folder, change):
    """A copy of a model with other tensors."""
    shutil.copytree(path, folder)
    tensors = change(load_file(path / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tokens_of_transformers(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return greedy(model, PROMPT, NEW_TOKENS)[0]


def tokens_of(folder, layout=None):
    with LLM(str(folder), layout, device="cpu", max_model_len=64) as llm:
        return llm.generate(PROMPT, SamplingParams(NEW_TOKENS, ignore_eos=True))[0].token_ids


def other_head(tensors):
    return tensors | {"lm_head.weight": torch.randn(tensors["model.embed_tokens.weight"].shape)}


def head_alone(tensors):
    head = tensors.pop("model.embed_tokens.weight")
    return tensors | {"lm_head.weight": head}


def without_prefix(tensors):
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("layout", [Layout(kvp=2), Layout(pp=2)], ids=["kvp", "stages"])
def test_a_head_beside_a_tied_embedding_is_used_and_said(path, tmp_path, layout):
    folder = changed(path, tmp_path / "model", other_head)
    with pytest.warns(UserWarning, match=r"has a different lm_head\.weight, which the engine uses"):
        found = tokens_of(folder, layout)
    assert found == tokens_of_transformers(folder)
    assert found != tokens_of(path)


@pytest.mark.parametrize("change", [without_prefix, head_alone])
def test_names_that_transformers_reads_too(path, tmp_path, change):
    folder = changed(path, tmp_path / "model", change)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokens_of(folder) == tokens_of(path) == tokens_of_transformers(folder)


def test_a_copy_of_the_embedding_is_no_other_head(path, tmp_path):
    folder = changed(
        path, tmp_path / "model", lambda given: given | {"lm_head.weight": given["model.embed_tokens.weight"].clone()}
    )
    with warnings.catch_warnings(), LLM(str(folder), device="cpu", max_model_len=64) as llm:
        warnings.simplefilter("error")
        assert llm.config.spec.vocabulary.tied_embeddings


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.bias",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.mlp.up_proj.weight_scale",
        "model.layers.2.input_layernorm.weight",
        "layers.1.post_feedforward_layernorm.weight",
        "something.weight",
    ],
)
def test_what_would_change_results_is_refused(path, tmp_path, name):
    folder = changed(path, tmp_path / "model", lambda tensors: tensors | {name: torch.ones(2)})
    with pytest.raises(UserError, match=r"a llama model does not use") as refusal:
        LLM(str(folder), device="cpu", max_model_len=64)
    assert refusal.value.code == "invalid_checkpoint"


def test_what_changes_nothing_is_told_in_one_warning(path, tmp_path):
    names = ("model.layers.0.self_attn.rotary_emb.inv_freq", "v_head.summary.weight", "mtp.layers.0.norm.weight")
    folder = changed(path, tmp_path / "model", lambda tensors: tensors | {name: torch.ones(2) for name in names})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with LLM(str(folder), device="cpu", max_model_len=64):
            pass
    (said,) = [str(one.message) for one in caught if "not read" in str(one.message)]
    assert said.startswith("3 tensors of the checkpoint, such as ")


@pytest.mark.parametrize(
    "names",
    [("language_model.model.", "visual.", "language_model."), ("language_model.", "visual.", "")],
    ids=["older", "without a head of its own"],
)
def test_vision_language_models_under_other_names(tmp_path, names):
    made = make_shown_oracle(VISION_LANGUAGE["qwen3_vl"], tmp_path / "made")
    save_tokenizer_files(made.path)
    decoder, tower, head = names

    def renamed(tensors):
        pairs = (("model.language_model.", decoder), ("model.visual.", tower), ("lm_head.", head + "lm_head."))
        found = {}
        for name, tensor in tensors.items():
            at, to = next((at, to) for at, to in pairs if name.startswith(at))
            found[to + name.removeprefix(at)] = tensor
        return found

    folder = changed(made.path, tmp_path / "model", renamed)
    shown = [made.images[name] for name in made.shown[0]]
    with LLM(str(folder), device="cpu", block_tokens=4) as llm:
        (result,) = llm.generate(ImagePrompt(made.given[0], shown), SamplingParams(12))
    assert result.token_ids == made.tokens[0]


def test_a_vision_language_models_own_head_is_used(tmp_path):
    made = make_shown_oracle(VISION_LANGUAGE["qwen3_vl"], tmp_path / "made")
    save_tokenizer_files(made.path)
    assert json.loads((made.path / "config.json").read_text())["tie_word_embeddings"]
    size = (199, 90)
    folder = changed(made.path, tmp_path / "model", lambda given: given | {"lm_head.weight": torch.randn(size)})
    with pytest.warns(UserWarning, match="has a different lm_head"):
        llm = LLM(str(folder), device="cpu", block_tokens=4)
    with llm:
        assert not llm.config.spec.vocabulary.tied_embeddings
        (result,) = llm.generate(made.given[1], SamplingParams(12))
    assert result.token_ids != made.tokens[1]
