"""A model with a window in its second layer, through the engine: the tokens of transformers, beyond the window."""

import pytest
from transformers import Qwen2Config

from longhelix import LLM, SamplingParams
from longhelix.spec.layout import Layout
from oracle import _COMMON, make_oracle, save_tokenizer_files
from tiers import few

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("all_cores")]

NEW_TOKENS = 8
TWO = Layout(kvp=2)
CASES = [
    (TWO, {"kv_cache_tokens": 256, "block_tokens": 16}),  # one request is preempted, or waits
    (Layout(kvp=2, tpa=1, tpf=1, ep=1, ffn_replicas=2), {"placement": "auto"}),
    (TWO, {}),
    (TWO, {"execution": "eager"}),
    (TWO, {"execution": "compiled"}),
    (TWO, {"chunk_tokens": 33}),
    (TWO, {"placement": "growing", "growth_limit_tokens": 32}),
    (TWO, {"batch_invariant": True}),
    (Layout(kvp=2, pp=2), {"chunk_tokens": 17}),
]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    config = Qwen2Config(
        num_attention_heads=6,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=20,
        max_window_layers=1,
        **(_COMMON | {"hidden_size": 96, "intermediate_size": 96, "max_position_embeddings": 512}),
    )
    folder = tmp_path_factory.mktemp("windowed")
    made = make_oracle(config, folder, prompt_lengths=(90, 130), new_tokens=NEW_TOKENS)
    save_tokenizer_files(folder)
    return made


@pytest.mark.parametrize(("layout", "settings"), few(CASES, 2))
def test_tokens_equal_transformers_with_and_without_cached_prefixes(oracle, layout, settings):
    params = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(oracle.path, layout, dtype="float32", device="cpu", max_model_len=200, **settings) as llm:
        for is_cached in (False, True):
            results = llm.generate(oracle.prompts, params)
            assert [result.token_ids for result in results] == oracle.tokens
            assert all((result.cached_tokens > 0) == is_cached for result in results)
