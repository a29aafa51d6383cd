"""A model of which every third layer sees everything and the others a window, through the engine, with so few KV blocks
of the window that those behind it are written over all the time: the tokens of transformers."""

import pytest
from transformers import Qwen2Config

from longhelix import LLM, SamplingParams
from longhelix.scheduler.kv.windows import span_blocks
from longhelix.spec.layout import Layout
from oracle import _COMMON, make_oracle, save_tokenizer_files
from tiers import few

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("all_cores")]

NEW_TOKENS, WINDOW = 24, 40
LENGTHS = (300, 90, 41, 200)
TWO = Layout(kvp=2)
GREEDY = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
CASES = [
    (TWO, {"max_running": 2, "chunk_tokens": 48}),
    (TWO, {"max_running": 2, "chunk_tokens": 64, "placement": "growing", "growth_limit_tokens": 64}),
    (TWO, {"max_running": 1, "chunk_tokens": 300}),
    (TWO, {"max_running": 3, "chunk_tokens": 17, "execution": "eager"}),
    (TWO, {"max_running": 2, "chunk_tokens": 33, "execution": "compiled"}),
    (TWO, {"max_running": 2, "chunk_tokens": 48, "placement": "local"}),
    (TWO, {"max_running": 4, "chunk_tokens": 48, "placement": "auto", "kvp_threshold_tokens": 128}),
    (TWO, {"max_running": 4, "chunk_tokens": 64, "kv_cache_tokens": 352}),  # some are preempted, or wait
    (TWO, {"max_running": 2, "chunk_tokens": 48, "batch_invariant": True}),
    (Layout(kvp=3, tpa=2), {"max_running": 2, "chunk_tokens": 48}),
    (Layout(kvp=2, pp=2), {"max_running": 3, "chunk_tokens": 31}),
    (Layout(kvp=2, tpa=1, tpf=1, ep=1, ffn_replicas=2), {"max_running": 3, "chunk_tokens": 64, "placement": "auto"}),
    (Layout(), {"max_running": 2, "chunk_tokens": 48, "prefix_cache": False}),
]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return make_model(tmp_path_factory.mktemp("groups"), kinds)


def make_model(folder, kinds):
    config = Qwen2Config(
        num_attention_heads=6,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=kinds,
        **(
            _COMMON
            | {
                "hidden_size": 96,
                "intermediate_size": 96,
                "max_position_embeddings": 512,
                "num_hidden_layers": len(kinds),
            }
        ),
    )
    made = make_oracle(config, folder, prompt_lengths=LENGTHS, new_tokens=NEW_TOKENS)
    save_tokenizer_files(folder)
    return made


def engine(oracle, layout, **settings):
    return LLM(oracle.path, layout, **{"dtype": "float32", "device": "cpu", "max_model_len": 400} | settings)


def held_in_window(llm):
    """The most blocks of a request that runs."""
    return max((len(seq.kv.windows[0].blocks) for seq in llm._core._scheduler.running), default=0)


@pytest.mark.parametrize(("layout", "settings"), few(CASES, 2))
def test_tokens_equal_transformers_while_blocks_behind_the_window_are_written_over(oracle, layout, settings):
    with engine(oracle, layout, **settings) as llm:
        assert llm.config.spec.groups == (1, 1, 0, 1)
        (window,) = llm.config.scheduler.cache.windows
        used = llm._core._scheduler.pool.windows[0].allocators
        for is_cached in (False, True):
            results = llm.generate(oracle.prompts, GREEDY)
            assert [result.token_ids for result in results] == oracle.tokens
            assert all(result.cached_tokens > 0 for result in results) <= is_cached
        assert all(allocator.available == window.num_blocks for allocator in used)


def test_a_model_of_windows_alone_holds_many_requests_in_little_memory(tmp_path):
    """The pool has room for one longest request; eight of that length run at once in it."""
    oracle = make_model(tmp_path, ["sliding_attention"] * 2)
    with engine(oracle, TWO, max_running=8, chunk_tokens=48, kv_cache_tokens=1200) as llm:
        (window,) = llm.config.scheduler.cache.windows
        assert window.num_blocks == -(-1200 // 32)
        results = llm.generate(oracle.prompts * 2, GREEDY)
        assert [result.token_ids for result in results] == oracle.tokens * 2
        assert sum(result.preemptions for result in results) == 0


def test_a_request_has_window_sized_memory_on_every_rank(oracle):
    """300 tokens are 19 blocks; the pool of the window has fewer, and a request that decodes has 6 at most."""
    settings = {"max_running": 1, "chunk_tokens": 48, "prefix_cache": False, "kv_cache_tokens": 2000}
    with engine(oracle, TWO, **settings) as llm:
        (window,) = llm.config.scheduler.cache.windows
        assert window.num_blocks == -(-span_blocks(window.visibility, 16) // 2) + 2
        request = llm.add(oracle.prompts[0], GREEDY)
        most = 0
        while llm.has_work:
            llm.step()
            most = max(most, held_in_window(llm))
        assert most <= span_blocks(window.visibility, 16) + 3
        assert request is not None


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    few([(TWO, Layout(kvp=3)), (Layout(kvp=2, pp=2), TWO), (Layout(tpa=2), Layout(kvp=2, tpa=3))]),
)
def test_a_saved_context_has_the_end_of_the_window_alone(oracle, tmp_path, saved_by, loaded_by):
    prompt, tokens = oracle.prompts[0], oracle.tokens[0]
    with engine(oracle, saved_by, contexts_dir=tmp_path, chunk_tokens=48) as llm:
        saved = llm.save_context("document", prompt[:290])
        while llm.has_work:
            llm.step()
    whole_bytes = 18 * 16 * 4 * 2 * 2 * 16 * 4  # blocks, tokens, layers, keys and values, KV heads, channels, float32
    assert saved.num_bytes < whole_bytes / 2
    with engine(oracle, loaded_by, contexts_dir=tmp_path, chunk_tokens=48) as llm:
        assert llm.load_context("document").loaded_blocks == 18
        assert llm.load_context("document").loaded_blocks == 0
        (result,) = llm.generate([prompt[290:]], GREEDY, context="document")
        assert result.cached_tokens == 288
        assert result.token_ids == tokens


@pytest.mark.parametrize("layout", few([TWO, Layout(kvp=2, pp=2), Layout(tpa=2)]))
def test_what_layers_see_is_swapped_in_all_groups(oracle, tmp_path, layout):
    """Pools for one request. Each one is asked again with all of its answer but the last token, and goes on from there;
    so does one behind a saved context."""
    settings = {"max_running": 1, "chunk_tokens": 48, "kv_cache_tokens": 352, "swap_tokens": 4000}
    with engine(oracle, layout, contexts_dir=tmp_path, **settings) as llm:
        assert [window.num_slots > 0 for window in llm.config.scheduler.cache.windows] == [True]
        llm._core._scheduler._swap_s = 0.0  # so small a model computes anything sooner
        llm.save_context("document", oracle.prompts[0][:290])
        results = llm.generate(oracle.prompts, GREEDY)
        assert [result.token_ids for result in results] == oracle.tokens
        asked = [prompt + tokens[:-1] for prompt, tokens in zip(oracle.prompts, oracle.tokens, strict=True)]
        results = llm.generate(asked, SamplingParams(max_new_tokens=1, ignore_eos=True))
        assert [result.token_ids for result in results] == [tokens[-1:] for tokens in oracle.tokens]
        assert [result.cached_tokens for result in results] == [(len(prompt) - 1) // 16 * 16 for prompt in asked]
        assert sum(result.swapped_tokens for result in results) > 300
        llm.load_context("document")
        (result,) = llm.generate([oracle.prompts[0][290:]], GREEDY, context="document")
        assert (result.cached_tokens, result.token_ids) == (288, oracle.tokens[0])
