"""The smallest whole, to be read first: two layers on two ranks that share the KV say what one rank says."""

import json

import pytest
import tokenizers
import torch
from safetensors.torch import save_file

from longhelix import LLM, Layout, SamplingParams
from longhelix.compute.models.parameters import declare
from longhelix.spec import read_hf_config

pytestmark = pytest.mark.dist

CONFIG = {
    "model_type": "llama", "dtype": "float32", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
PROMPT = [(7 * position) % 100 for position in range(50)]
NEW_TOKENS = 8


@pytest.fixture
def model(tmp_path):
    """A folder in Hugging Face's format: a config, random weights, a tokenizer of a hundred words."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    generator = torch.Generator().manual_seed(0)
    weights = {
        source.name: torch.randn(source.shape, generator=generator) / 4 + (len(source.shape) == 1)  # norms about 1
        for parameter in declare(read_hf_config(CONFIG), Layout(), rank=0)
        for source in parameter.sources
    }
    save_file(weights, tmp_path / "model.safetensors")
    words = {f"word{number}": number for number in range(100)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "word0")).save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path)


def test_two_ranks_say_what_one_says(model):
    def answer(layout):
        with LLM(model, layout, chunk_tokens=16) as llm:  # ranks are processes: they end here
            (result,) = llm.generate([PROMPT], SamplingParams(max_new_tokens=NEW_TOKENS))
        return result

    alone, shared = answer(Layout()), answer(Layout(kvp=2))
    assert shared.token_ids == alone.token_ids
    assert len(set(shared.token_ids)) > 1
    # Every token but the last has keys and values; blocks of sixteen go to the ranks in turn: 16 + 16 and 16 + 9.
    assert alone.kv_tokens_per_rank == [len(PROMPT) + NEW_TOKENS - 1]
    assert shared.kv_tokens_per_rank == [32, 25]
