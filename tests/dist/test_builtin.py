"""The built-in model at real size: KVP = 2 gives the tokens that transformers gives, on a prompt of the repository."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from builtin import builtin, builtin_config
from longhelix import LLM, Layout, SamplingParams

pytestmark = pytest.mark.dist

NEW_TOKENS = 32
TOLERANCE = 1e-4


def builtin_of_transformers():
    """In float32. That the file's numbers are read as transformers reads them is tested in test_checkpoint."""
    model, checkpoint = LlamaForCausalLM(builtin_config()).eval(), builtin()
    tensors = {
        name: checkpoint.read(name, tuple(slice(0, size) for size in info.shape)).float()
        for name, info in checkpoint.tensors.items()
    }
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


@torch.no_grad()
def continue_with_transformers(model, prompt_ids, count):
    """Greedy tokens, and the gap between the two best logits at each, relative to the largest."""
    tokens, gaps = [], []
    out = model(torch.tensor([prompt_ids]), use_cache=True, logits_to_keep=1)
    for _ in range(count):
        logits_V = out.logits[0, -1]
        best = logits_V.topk(2).values
        tokens.append(int(logits_V.argmax()))
        gaps.append(float((best[0] - best[1]) / logits_V.abs().max()))
        out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
    return tokens, gaps


@pytest.mark.parametrize("prompt_tokens", [600, pytest.param(2000, marks=pytest.mark.slow)])
def test_greedy_continuation_equals_transformers(prompt_tokens):
    """After text of the project's own, of more tokens than a chunk has."""
    text = Path(__file__).parents[2].joinpath("LICENSE").read_text()
    with LLM("builtin", Layout(kvp=2), dtype="float32") as llm:
        prompt_ids = llm.tokenizer.encode(text)[:prompt_tokens]
        (result,) = llm.generate([prompt_ids], SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
    assert len(prompt_ids) == prompt_tokens
    assert sum(result.kv_tokens_per_rank) == len(prompt_ids) + NEW_TOKENS - 1
    tokens, gaps = continue_with_transformers(builtin_of_transformers(), prompt_ids, NEW_TOKENS)
    assert len(set(tokens)) >= 8
    differs = next((i for i in range(NEW_TOKENS) if result.token_ids[i] != tokens[i]), None)
    assert differs is None or gaps[differs] < 2 * TOLERANCE, (differs, gaps[differs])


@pytest.mark.slow  # eight processes
def test_a_rank_without_rows_of_the_output_projection_takes_part():
    """Nine query heads over TPA 2 and then KVP 4: the last rank has none of them after the exchange."""
    sampling = SamplingParams(max_new_tokens=6)
    said = []
    for layout in (Layout(), Layout(kvp=4, tpa=2)):
        with LLM("builtin", layout, dtype="float32", max_model_len=256) as llm:
            said += [result.token_ids for result in llm.generate(["The capital of France is"], sampling)]
    assert said[0] == said[1]
