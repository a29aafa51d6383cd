"""Any values for any setting, and any prompt: refused in a sentence or served, and the engine goes on serving."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anything import VALUES
from longhelix import LLM, Layout, SamplingParams, UserError
from oracle import FAMILIES, make_oracle, save_tokenizer_files

pytestmark = pytest.mark.dist

PROMPT, NEW_TOKENS = list(range(1, 20)), 4
FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
# Settings that can be served, so that not everything is refused at its first field.
SOUND = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 3)},
    optional={
        "temperature": st.sampled_from([0, 1e-30, 1e-5, 0.5, 1e6, 1e30]),
        "top_k": st.sampled_from([0, 1, 5, 2**31 - 1]),
        "top_p": st.sampled_from([1e-300, 0.5, 1]),
        "min_p": st.sampled_from([0, 1e-300, 0.5, 1]),
        "repetition_penalty": st.sampled_from([1e-6, 0.5, 1, 1e6]),
        "presence_penalty": st.sampled_from([-2, 0.5, 2]),
        "frequency_penalty": st.sampled_from([-2, 0.5, 2]),
        "logit_bias": st.dictionaries(st.integers(0, 120), st.sampled_from([-100, 0.5, 100]), max_size=3),
        "min_tokens": st.integers(0, 1),
        "seed": st.sampled_from([0, 2**63 - 1]),
        "stop": st.lists(st.text(min_size=1, max_size=3), max_size=3),
        "stop_token_ids": st.lists(st.integers(0, 120), max_size=3),
        "logprobs": st.sampled_from([0, 1, 100]),
        "prompt_logprobs": st.sampled_from([0, 1, 100]),
    },
)
ODD = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=2)
IDS = st.lists(st.integers(0, 90), min_size=1, max_size=40)
SOUND_PROMPTS = st.one_of(IDS, st.lists(IDS, min_size=1, max_size=3), st.text(min_size=1, max_size=20))
ODD_PROMPTS = st.one_of(VALUES, st.lists(VALUES, max_size=2))
# `one_of` gives every kind of odd value the weight of all sound ones.
PROMPTS = st.booleans().flatmap(lambda sound: SOUND_PROMPTS if sound else ODD_PROMPTS)
SERVED = {"served": 0, "refused": 0}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    oracle = make_oracle(FAMILIES["llama"], tmp_path_factory.mktemp("llama"))
    save_tokenizer_files(oracle.path)
    with LLM(str(oracle.path), Layout(kvp=2), chunk_tokens=16, kv_cache_tokens=1024) as started:
        yield started


@pytest.fixture(scope="module")
def plain(llm):
    """What the engine gives a plain request before anything odd came."""
    return serve_plain(llm)


def assert_sentence(error):
    assert 10 < len(str(error).encode()) < 400


def serve_plain(llm):
    (result,) = llm.generate([PROMPT], SamplingParams(max_new_tokens=NEW_TOKENS))
    return result.token_ids


@pytest.mark.timeout(240)  # a hang ends here, and with it the ranks
@settings(max_examples=150)  # of which enough are served, and enough refused
@given(prompts=PROMPTS, sound=SOUND, odd=st.booleans().flatmap(lambda sound: st.just({}) if sound else ODD))
def test_any_input_is_refused_or_served_and_the_engine_goes_on(llm, plain, prompts, sound, odd):
    try:
        results = llm.generate(prompts, SamplingParams(**sound | odd))
    except UserError as refused:
        SERVED["refused"] += 1
        assert_sentence(refused)
    else:
        assert all(result.error is None for result in results)
        SERVED["served"] += bool(results)
    assert serve_plain(llm) == plain
    assert not llm._live


def test_some_of_it_was_served_and_some_refused():
    if not any(SERVED.values()):
        pytest.skip("no input was tried in this selection of tests")
    assert min(SERVED.values()) > 10, SERVED
