"""Logit bias, penalties of presence and frequency, and min_tokens: in every layout the tokens of a dense formula."""

import copy

import pytest
import torch
from test_equality import first_difference, is_near_tie, make_case
from transformers import AutoModelForCausalLM

import sorted_rows
from dense_adjustments import adjusted
from longhelix import LLM, Layout, SamplingParams
from oracle import FAMILIES, NATIVE_SIZES, NEW_TOKENS, VOCAB, greedy_of, make_oracle, save_tokenizer_files
from tiers import few

pytestmark = pytest.mark.dist

EOS = 83
# The first and the last id lie on different ranks wherever there are several.
BIAS = {0: 100, VOCAB - 1: -100}
STOPS = tuple(range(3, VOCAB, 2))  # half of all: the likeliest is often among them
PENALTIES = {"presence_penalty": 1.1, "frequency_penalty": 0.4}
GREEDY = [
    {},
    {"logit_bias": BIAS},
    PENALTIES,
    {"min_tokens": NEW_TOKENS - 3, "stop_token_ids": STOPS},
    {"logit_bias": {0: 1.5, 120: 2.5, 198: -3.0}, "min_tokens": 5, "stop_token_ids": STOPS} | PENALTIES,
]
DRAWN = [
    {"temperature": 0.05, "presence_penalty": -0.3, "frequency_penalty": -0.1},
    {"temperature": 0.5, "top_p": 0.9, "min_tokens": NEW_TOKENS, "stop_token_ids": STOPS},
    {"temperature": 1.0, "repetition_penalty": 1.3, "logit_bias": {0: 4.0, 198: 4.0}} | PENALTIES,
    {"temperature": 5.0, "top_k": 90, "min_p": 0.01, "min_tokens": 3, "stop_token_ids": STOPS},
]


def params_of(choice):
    return SamplingParams(**{"max_new_tokens": NEW_TOKENS} | choice)


def as_json(choices):
    """Keys of JSON are strings."""
    return [choice | {"logit_bias": [*choice.get("logit_bias", {}).items()]} for choice in choices]


def ending(config, folder):
    """Sequences end with EOS."""
    config = copy.deepcopy(config)
    config.eos_token_id = EOS
    made = make_oracle(config, folder)
    save_tokenizer_files(made.path)
    return made


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    return ending(FAMILIES["llama"], tmp_path_factory.mktemp("llama-eos"))


@pytest.fixture(scope="module")
def model(oracle):
    return AutoModelForCausalLM.from_pretrained(oracle.path, dtype=torch.float32, attn_implementation="eager").eval()


def greedy(model, prompt, choice):
    """Of transformers' logits."""
    params = params_of(choice)
    stops = {*params.stop_token_ids, EOS}

    def logits(ids):
        logits_SV = model(torch.tensor([ids]), use_cache=False).logits[0]
        adjusted_V = adjusted(logits_SV[-1], params, ids[len(prompt) :], stops)
        return torch.cat((logits_SV[:-1], adjusted_V[None]))

    return greedy_of(logits, prompt, NEW_TOKENS), logits


def assert_greedy(model, prompt, choice, found):
    (tokens, _), logits = greedy(model, prompt, choice)
    differs = first_difference(found, tokens)
    if differs is not None:
        logits_V = logits([*prompt, *tokens[:differs]])[-1].detach()
        assert is_near_tie(logits_V[logits_V.isfinite()].numpy()), (choice, differs)


@pytest.mark.parametrize(
    "layout", few([pytest.param((2, 2)), "tied", "stages", pytest.param((1, 1)), pytest.param((3, 2))], 3), ids=str
)
def test_tokens_are_those_of_adjusted_rows(worlds, oracle, model, layout):
    """Of transformers' rows where they are greedy, and of the ranks' own, to the bit, whatever the filters."""
    choices = GREEDY + DRAWN
    prompts = [[1 + (7 * index + step) % (VOCAB - 1) for step in range(3 + index)] for index in range(len(choices))]
    more = {"prompts": prompts, "sampling": as_json(choices), "tied": layout == "tied"}
    kvp, tpa = (2, 2) if layout == "tied" else (2, 1) if layout == "stages" else layout
    pp = 2 if layout == "stages" else 1
    ranks = worlds(pp * kvp * tpa).run(make_case(oracle, kvp, tpa, 16, "striped", pp=pp, **more))
    for index, (prompt, choice) in enumerate(zip(prompts, choices, strict=True)):
        params, tokens = params_of(choice), ranks[0][f"tokens_{index}"].tolist()
        (logits_TV,) = [rank[f"logits_{index}"] for rank in ranks if f"logits_{index}" in rank]
        rows_TV = torch.from_numpy(logits_TV)[len(prompt) - 1 :]
        assert len(tokens) == NEW_TOKENS
        for count, token in enumerate(tokens):
            seen_V = torch.zeros(VOCAB, dtype=torch.bool)
            seen_V[[*prompt, *tokens[:count]]] = True
            logits_V = adjusted(rows_TV[count], params, tokens[:count], {*params.stop_token_ids, EOS})
            expected = sorted_rows.sample(logits_V, params, index, len(prompt) + count, seen_V)
            assert token == expected, (choice, count)
        if choice in GREEDY:
            assert_greedy(model, prompt, choice, tokens)
        assert all(rank[f"tokens_{index}"].tolist() == tokens for rank in ranks)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = ending(NATIVE_SIZES, tmp_path_factory.mktemp("sixteens-eos")).path
    with LLM(str(path), Layout(kvp=2), batch_invariant=True, chunk_tokens=16, kv_cache_tokens=512) as started:
        yield started


@pytest.mark.parametrize("min_tokens", [0, 1, 6, 12])
def test_a_text_that_wants_to_end_has_its_least_tokens(llm, oracle, min_tokens):
    prompt = oracle.prompts[3]
    wanted = {"max_new_tokens": 12, "logit_bias": {EOS: 100}, "min_tokens": min_tokens}
    (result,) = llm.generate([prompt], SamplingParams(**wanted))
    assert len(result.token_ids) == min_tokens
    assert result.finish_reason == ("stop" if min_tokens < 12 else "length")
    assert EOS not in result.token_ids
    (ignored,) = llm.generate([prompt], SamplingParams(**wanted, ignore_eos=True))
    assert ignored.token_ids == result.token_ids + [EOS] * (12 - min_tokens)


def test_bits_do_not_depend_on_the_batch(llm, oracle):
    """What others ask for, or that nobody else asks for anything, changes no token and no log-probability."""
    plain = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, logprobs=5, ignore_eos=True)
    asked = SamplingParams(
        max_new_tokens=12, temperature=1.0, seed=3, logprobs=5, ignore_eos=True,
        logit_bias={0: 3.0, 198: 3.0}, min_tokens=9, stop_token_ids=(1,), **PENALTIES,
    )  # fmt: skip
    prompt = oracle.prompts[3]
    alone = [llm.generate([prompt], params)[0] for params in (plain, asked)]
    ids = [llm.add(prompt, params) for params in (plain, asked, plain, asked)]
    results = {}
    while llm.has_work:
        results |= {delta.request_id: delta.result for delta in llm.step() if delta.result is not None}
    for request_id, expected in zip(ids, alone * 2, strict=True):
        assert results[request_id].token_ids == expected.token_ids
        assert results[request_id].logprobs == expected.logprobs
    assert alone[0].token_ids != alone[1].token_ids
    first = [result.logprobs[0] for result in alone]
    common = first[0].keys() & first[1].keys()
    assert len(common) >= 5
    assert all(first[0][token_id] == first[1][token_id] for token_id in common)


def test_what_was_generated_before_a_preemption_counts(oracle):
    """On ranks of which each has a part of the vocabulary and of the KV."""
    sampling = SamplingParams(
        max_new_tokens=40, ignore_eos=True, logit_bias={5: 1.0}, min_tokens=30, stop_token_ids=(2,), **PENALTIES
    )
    found = []
    for tokens in (1024, 128):
        with LLM(str(oracle.path), Layout(kvp=2), kv_cache_tokens=tokens, dtype="float32", prefix_cache=False) as llm:
            found.append(llm.generate([oracle.prompts[2], oracle.prompts[1], oracle.prompts[2]], sampling))
    assert sum(result.preemptions for result in found[0]) == 0
    assert sum(result.preemptions for result in found[1]) > 0
    assert [result.token_ids for result in found[0]] == [result.token_ids for result in found[1]]
