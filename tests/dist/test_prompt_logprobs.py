"""Log-probabilities of a prompt's own tokens are those of transformers, whatever computes them in whatever chunks."""

import numpy as np
import pytest
import torch

from longhelix import LLM, Layout, SamplingParams, UserError
from oracle import FAMILIES, VOCAB, make_oracle, save_tokenizer_files
from tiers import few

pytestmark = pytest.mark.dist

CHUNK_TOKENS = 8
LENGTHS = (1, 2, 8, 9, 16, 41)  # a chunk exactly, one more, several and one more
TOLERANCE = 1e-3
SETTINGS = {
    "dtype": "float32",
    "block_tokens": 4,
    "max_model_len": 64,
    "chunk_tokens": CHUNK_TOKENS,
    "kv_cache_tokens": 2048,
}
# 199 tokens over two, three and four ranks are uneven parts; in the tied layout each instance has a copy.
LAYOUTS = {
    "one rank": (Layout(), {}),
    "tpa 2": (Layout(tpa=2), {}),
    "kvp 2 x tpa 2": (Layout(kvp=2, tpa=2), {}),
    "growing over kvp 3": (Layout(kvp=3), {"placement": "growing", "growth_limit_tokens": 12}),
    "pp 2": (Layout(pp=2), {}),
    "kvp 2 x pp 2": (Layout(kvp=2, pp=2), {}),
    "tied, own clocks": (
        Layout(kvp=2, tpa=2, tpf=2, ffn_replicas=2),
        {"placement": "growing", "growth_limit_tokens": 12},
    ),
    "token shards": (Layout(tpa=2), {"flash_comm_v1": True, "sp_min_token_num": 4}),
    "tied, pp 2": (Layout(kvp=2, pp=2, ffn_replicas=2), {}),
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    made = make_oracle(FAMILIES["llama"], tmp_path_factory.mktemp("llama"), prompt_lengths=LENGTHS)
    save_tokenizer_files(made.path)
    return made


@pytest.fixture(scope="module")
def llm(oracle):
    with LLM(str(oracle.path), Layout(kvp=2), **SETTINGS) as started:
        yield started


def assert_of(found, prompt, logits_TV, count):
    """The entries of a prompt are log_softmax of the rows before its tokens: of the `count` best, and of the token."""
    expected_TV = torch.from_numpy(logits_TV).double().log_softmax(-1).numpy()
    assert found[0] is None
    assert len(found) == len(prompt)
    for token, entry, expected_V in zip(prompt[1:], found[1:], expected_TV, strict=False):
        best = np.sort(expected_V)[::-1][:count]
        assert list(entry.values())[:count] == pytest.approx(best, abs=TOLERANCE)
        assert entry == pytest.approx({id: expected_V[id] for id in entry}, abs=TOLERANCE)
        assert token in entry
        assert len(entry) - count in (0, 1)
        assert (len(entry) > count) == (list(entry).index(token) == count)


def assert_all(oracle, results, count):
    for prompt, logits_TV, tokens, result in zip(oracle.prompts, oracle.logits, oracle.tokens, results, strict=True):
        assert_of(result.prompt_logprobs, prompt, logits_TV, count)
        assert result.token_ids == tokens[: len(result.token_ids)]


def asked(count, new_tokens=4, **more):
    return SamplingParams(max_new_tokens=new_tokens, prompt_logprobs=count, ignore_eos=True, **more)


@pytest.mark.parametrize("layout", few(reversed(LAYOUTS), 4))
def test_they_are_those_of_transformers(oracle, layout):
    """All prompts at once, then again: what is cached by then is computed once more."""
    layout, more = LAYOUTS[layout]
    with LLM(str(oracle.path), layout, **SETTINGS | more) as llm:
        for count in (3, 0):
            results = llm.generate(oracle.prompts, asked(count))
            assert_all(oracle, results, count)
            assert [result.cached_tokens for result in results] == [0] * len(LENGTHS)
        (plain,) = llm.generate([oracle.prompts[-1]], SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert (plain.prompt_logprobs, plain.cached_tokens) == (None, 40)


def test_a_chunk_of_more_rows_than_have_logits_at_once(oracle):
    """In one chunk of 600 rows the same as in many; the last piece has less rows than the others."""
    prompt = [(7 * index + index // 9) % VOCAB for index in range(600)]
    settings = {"dtype": "float32", "max_model_len": 1024}
    found = []
    for layout, chunk_tokens in ((Layout(), 64), (Layout(kvp=2), 1024)):
        with LLM(str(oracle.path), layout, chunk_tokens=chunk_tokens, **settings) as llm:
            (result,) = llm.generate([prompt], asked(2, 1))
            found.append(result.prompt_logprobs)
    assert [len(each) for each in found] == [600, 600]
    for own, other in zip(found[0][1:], found[1][1:], strict=True):
        assert list(own.values())[:2] == pytest.approx(list(other.values())[:2], abs=TOLERANCE)
    for index, token in enumerate(prompt[1:], start=1):
        assert found[0][index][token] == pytest.approx(found[1][index][token], abs=TOLERANCE)


def test_beside_requests_that_do_not_ask(llm, oracle):
    """Others get what they get alone, cached prefixes as well."""
    llm.generate([oracle.prompts[-1]], SamplingParams(max_new_tokens=1, ignore_eos=True))
    plain = SamplingParams(max_new_tokens=16, ignore_eos=True)
    streams = [llm.stream(prompt, plain) for prompt in oracle.prompts]
    next(streams[0])
    results = llm.generate(oracle.prompts, asked(2))
    assert_all(oracle, results, 2)
    others = [list(stream)[-1].result for stream in streams]
    assert [other.token_ids for other in others] == oracle.tokens
    assert [other.prompt_logprobs for other in others] == [None] * len(LENGTHS)
    assert others[-1].cached_tokens == 40


def test_what_was_saved_is_computed_again(oracle, tmp_path):
    """A context's rows are scored as those of the prompt behind it."""
    prompt = oracle.prompts[-1]
    with LLM(str(oracle.path), Layout(kvp=2), **SETTINGS, contexts_dir=tmp_path) as llm:
        llm.save_context("begin", prompt[:30])
        (result,) = llm.generate([prompt[30:]], asked(2), context="begin")
        (plain,) = llm.generate([prompt[30:]], SamplingParams(max_new_tokens=4, ignore_eos=True), context="begin")
    assert_of(result.prompt_logprobs, prompt, oracle.logits[-1], 2)
    assert (result.cached_tokens, plain.cached_tokens) == (0, 40)
    assert result.token_ids == plain.token_ids == oracle.tokens[-1][:4]


def test_no_new_token_is_given_where_none_is_wanted(llm, oracle):
    stop = tuple(tokens[0] for tokens in oracle.tokens)  # which would end them with another reason
    results = llm.generate(oracle.prompts, asked(2, 0, stop_token_ids=stop))
    assert_all(oracle, results, 2)
    assert [(result.token_ids, result.text, result.finish_reason) for result in results] == [([], "", "length")] * 6
    *begin, last = llm.stream(oracle.prompts[-1], asked(0, 0))
    assert begin == []
    assert (last.token_id, last.text) == (None, "")
    assert_of(last.result.prompt_logprobs, oracle.prompts[-1], oracle.logits[-1], 0)


def test_a_stream_has_a_delta_for_each_new_token_and_no_other(llm, oracle):
    deltas = list(llm.stream(oracle.prompts[-1], asked(1, 4)))
    assert [delta.token_id for delta in deltas] == oracle.tokens[-1][:4]
    assert_of(deltas[-1].result.prompt_logprobs, oracle.prompts[-1], oracle.logits[-1], 1)


def test_a_request_that_is_aborted_has_those_of_the_chunks_so_far(llm, oracle):
    request_id = llm.add(oracle.prompts[-1], asked(1))
    llm.step()
    llm.step()
    result = llm.abort(request_id)
    assert len(result.prompt_logprobs) == 1 + 2 * CHUNK_TOKENS
    assert_of(result.prompt_logprobs, oracle.prompts[-1][: 1 + 2 * CHUNK_TOKENS], oracle.logits[-1], 1)
    while llm.has_work:
        llm.step()


PRESSED = {
    "one rank": (Layout(), {"kv_cache_tokens": 72}),
    "kvp 2": (Layout(kvp=2), {"kv_cache_tokens": 96}),
    "pp 2": (Layout(pp=2), {"kv_cache_tokens": 72}),
    "own clocks": (
        Layout(kvp=2, ffn_replicas=2),
        {"kv_cache_tokens": 128, "placement": "growing", "growth_limit_tokens": 24},
    ),
}


@pytest.mark.parametrize("prefix_cache", few([True, False]), ids=["cached", "not cached"])
@pytest.mark.parametrize("layout", PRESSED)
def test_a_preempted_request_has_each_of_them_once(oracle, layout, prefix_cache):
    """Answers that grow push out others, in the middle of their prompts and behind them."""
    layout, more = PRESSED[layout]
    prompts = [oracle.prompts[-1], oracle.prompts[-2], oracle.prompts[-1][:30], oracle.prompts[-1]] * 2
    with LLM(str(oracle.path), layout, **SETTINGS | more, prefix_cache=prefix_cache) as llm:
        results = llm.generate(prompts, asked(2, 16))
    assert sum(result.preemptions for result in results) > 0
    rows = [oracle.logits[-1], oracle.logits[-2], oracle.logits[-1], oracle.logits[-1]] * 2
    for prompt, logits_TV, result in zip(prompts, rows, results, strict=True):
        assert_of(result.prompt_logprobs, prompt, logits_TV, 2)
        assert len(result.token_ids) == 16


@pytest.fixture
def broken_logits(tmp_path, monkeypatch):
    """Where one row is asked about, its logits are not finite."""
    program = """
from longhelix.compute.runner.scoring import Scoring
gather = Scoring._gather
def broken(scoring, logits_Sv, targets_S, count):
    if len(targets_S) == 1:
        logits_Sv[0] = float("nan")
    return gather(scoring, logits_Sv, targets_S, count)
Scoring._gather = broken
"""
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.slow
def test_logits_without_a_probability_end_their_request_alone(broken_logits, oracle):
    """A prompt of two tokens has one row that is asked about."""
    with LLM(str(oracle.path), Layout(kvp=2), **SETTINGS) as llm:
        two, other = llm.generate([oracle.prompts[1], oracle.prompts[3]], asked(1))
    words = "ValueError: no token has a probability, because the largest logit is nan"
    assert (two.finish_reason, two.error) == ("error", words)
    assert (other.finish_reason, other.token_ids) == ("length", oracle.tokens[3][:4])


@pytest.mark.parametrize("layout", ["one rank", "kvp 2 x tpa 2", "growing over kvp 3", "tied, own clocks"])
def test_a_prompt_may_fill_the_whole_context_where_no_new_token_is_wanted(oracle, layout):
    """41 tokens fill blocks of 4 but for one token."""
    layout, more = LAYOUTS[layout]
    with LLM(str(oracle.path), layout, **SETTINGS | more | {"max_model_len": LENGTHS[-1]}) as llm:
        results = llm.generate(oracle.prompts, asked(1, 0))
        assert_all(oracle, results, 1)
        with pytest.raises(UserError, match="41 prompt tokens plus 1 new tokens exceed"):
            llm.generate([oracle.prompts[-1]], asked(1, 1))
        with pytest.raises(UserError, match="the prompt has 42 tokens, but --max-model-len is 41"):
            llm.generate([[1] * 42], asked(1, 0))
