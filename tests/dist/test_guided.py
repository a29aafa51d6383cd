"""Guided decoding by real ranks: in every layout the tokens of a dense formula, JSON that its schema allows, and
nothing for anybody else."""

import copy
import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch
from test_equality import first_difference, is_near_tie
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from longhelix import LLM, EngineError, Guide, Layout, SamplingParams, UserError
from longhelix.compute.runner.matchers import Matchers
from longhelix.scheduler.guide import ReasoningTags
from oracle import FAMILIES, NATIVE_SIZES, VOCAB, greedy_of, make_oracle
from tiers import few

pytestmark = pytest.mark.dist

EOS = 150  # and two ids beyond the tokenizer's on each side of it
TEXTS = [chr(code) for code in range(33, 127)] + [
    "Ġ",
    "Ċ",
    '{"',
    '":',
    "ab",
    "true",
    "al",
    "null",
    "12",
    "Ġ{",
    '"}',
    "[[",
    "]]",
]
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "n": {"type": "integer", "minimum": -50, "maximum": 50},
        "kind": {"enum": ["a", "b", None]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2},
    },
    "required": ["ok", "n", "kind", "tags"],
    "additionalProperties": False,
}
GUIDES = [
    Guide.of_schema(SCHEMA),
    Guide("regex", "[a-f]{4,12}(true|null)?"),
    Guide("grammar", 'root ::= "a" | "[" root "]" | "{" root "}"'),
    Guide.of_choices(["yes", "no", "nothing at all"]),
    Guide("regex", "[xy]{3}", ReasoningTags("<<", "]", is_open=True)),
]


def check_schema(text):
    found = json.loads(text)
    assert list(found) == ["ok", "n", "kind", "tags"]
    assert type(found["ok"]) is bool
    assert type(found["n"]) is int
    assert -50 <= found["n"] <= 50
    assert found["kind"] in ("a", "b", None)
    assert 1 <= len(found["tags"]) <= 2
    assert all(isinstance(tag, str) and len(tag) <= 3 for tag in found["tags"])


def is_of(guide, text):
    if guide.reasoning is not None:
        text = text.split(guide.reasoning.end, 1)[1].lstrip("\n")
    match guide.kind:
        case "json_schema":
            check_schema(text)
        case "regex":
            assert re.fullmatch(guide.text, text)
        case "grammar":
            assert re.fullmatch(r"[\[{]*a[\]}]*", text)
        case "choice":
            assert text in json.loads(guide.text)


def model_of(config, folder):
    """A model whose tokens are of bytes, and whose texts end."""
    config = copy.deepcopy(config)
    config.eos_token_id = EOS
    made = make_oracle(config, folder)
    tokenizer = Tokenizer(models.BPE(vocab={text: token_id for token_id, text in enumerate(TEXTS)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(made.path / "tokenizer.json"))
    return made


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    return model_of(FAMILIES["llama"], tmp_path_factory.mktemp("guided"))


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    return model_of(NATIVE_SIZES, tmp_path_factory.mktemp("guided-sixteens"))


def guided_greedy(model, table, prompt, guide, most):
    """Greedy tokens of transformers' logits, of those that the guide allows; and these logits."""

    def logits(ids):
        matcher = Matchers(table).new(guide)
        for token_id in ids[len(prompt) :]:
            matcher.add_one(token_id)
        rows_SV = model(torch.tensor([ids]), use_cache=False).logits[0]
        if not matcher.has_ended:
            rows_SV[-1][torch.from_numpy(~matcher.allowed())] = -torch.inf
        return rows_SV

    tokens, _ = greedy_of(logits, prompt, most)
    return tokens[: tokens.index(EOS)] if EOS in tokens else tokens, logits


LAYOUTS = {
    "one": (Layout(), {}),
    "kvp": (Layout(kvp=3), {}),
    "both": (Layout(kvp=2, tpa=2), {}),
    "tied": (Layout(kvp=2, tpf=1, ffn_replicas=2), {"placement": "local"}),
    "stages": (Layout(pp=2), {}),
    "stages of ranks": (Layout(kvp=2, pp=2), {}),
}


@pytest.mark.parametrize("name", few(reversed(LAYOUTS), 2))
def test_tokens_are_those_of_masked_rows(oracle, name):
    """Of transformers' where they are greedy; all, drawn ones too, those of one rank, whatever runs beside them."""
    layout, settings = LAYOUTS[name]
    prompt, most = oracle.prompts[2], 40
    drawn = [SamplingParams(most, 1.0, seed=seed, guide=guide) for seed in range(3) for guide in GUIDES]
    greedy = [SamplingParams(most, guide=guide) for guide in GUIDES]
    with LLM(str(oracle.path), layout, kv_cache_tokens=4096, dtype="float32", **settings) as llm:
        table = llm._guides.table
        ids = [llm.add(prompt, params) for params in greedy + drawn]
        results = {}
        while llm.has_work:
            results |= {delta.request_id: delta.result for delta in llm.step() if delta.result is not None}
    found = [results[request_id] for request_id in ids]
    assert not any(result.error for result in found)
    for params, result in zip(greedy + drawn, found, strict=True):
        if result.finish_reason == "stop":
            is_of(params.guide, result.text)
    assert sum(result.finish_reason == "stop" for result in found) > len(GUIDES)
    model = AutoModelForCausalLM.from_pretrained(oracle.path, dtype=torch.float32, attn_implementation="eager").eval()
    for guide, result in zip(GUIDES, found, strict=False):
        tokens, logits = guided_greedy(model, table, prompt, guide, most)
        differs = first_difference(result.token_ids, tokens)
        if differs is not None:
            logits_V = logits([*prompt, *tokens[:differs]])[-1].detach()
            assert is_near_tie(logits_V[logits_V.isfinite()].numpy()), (guide, differs)


@pytest.fixture(scope="module")
def exact(native):
    with LLM(str(native.path), Layout(kvp=2), batch_invariant=True, chunk_tokens=16, kv_cache_tokens=2048) as llm:
        yield llm


@pytest.mark.slow
def test_layouts_of_exact_sums_give_the_same_tokens(native, exact):
    prompt = native.prompts[3]
    asked = [SamplingParams(40, 1.0, seed=seed, guide=guide) for seed in range(4) for guide in GUIDES]
    first = [exact.generate([prompt], params)[0].token_ids for params in asked]
    with LLM(str(native.path), Layout(), batch_invariant=True, chunk_tokens=16, kv_cache_tokens=2048) as alone:
        second = [alone.generate([prompt], params)[0].token_ids for params in asked]
    assert first == second


def test_what_is_guided_changes_no_bit_of_others_and_is_changed_by_none(exact, native):
    prompt = native.prompts[3]
    plain = SamplingParams(24, 1.0, seed=3, logprobs=5, ignore_eos=True)
    guided = SamplingParams(24, 1.0, seed=3, logprobs=5, guide=GUIDES[1], min_tokens=5)
    alone = [exact.generate([prompt], params)[0] for params in (plain, guided)]
    ids = [exact.add(prompt, params) for params in (plain, guided, plain, guided)]
    results = {}
    while exact.has_work:
        results |= {delta.request_id: delta.result for delta in exact.step() if delta.result is not None}
    for request_id, expected in zip(ids, alone * 2, strict=True):
        assert results[request_id].token_ids == expected.token_ids
        assert results[request_id].logprobs == expected.logprobs
    # Log-probabilities are the model's own: those of the first token do not know of the guide.
    first = [result.logprobs[0] for result in alone]
    common = first[0].keys() & first[1].keys()
    assert len(common) >= 5
    assert all(first[0][token_id] == first[1][token_id] for token_id in common)


def test_min_tokens_go_before_what_may_end_and_a_guide_before_min_tokens(exact, native):
    prompt, wants_to_end = native.prompts[3], {"logit_bias": {EOS: 100}, "max_new_tokens": 20}
    for least in (0, 4, 9):
        guide = Guide("regex", "(a|b|c)*")
        (result,) = exact.generate([prompt], SamplingParams(guide=guide, min_tokens=least, **wants_to_end))
        assert (len(result.token_ids), result.finish_reason) == (least, "stop")
        (result,) = exact.generate(
            [prompt], SamplingParams(guide=Guide.of_choices(["abc"]), min_tokens=least, **wants_to_end)
        )
        assert (result.text, result.finish_reason) == ("abc", "stop")


@pytest.mark.parametrize("reasoning", [None, ReasoningTags("<<", "]", is_open=True)], ids=["answer", "reasoning"])
def test_a_guide_goes_on_after_a_preemption(oracle, reasoning):
    guide = Guide("regex", "([a-f]{2}-[0-9]{2} )*", reasoning)
    closes = {} if reasoning is None else {TEXTS.index("]"): 4}
    sampling = SamplingParams(40, 1.0, seed=5, min_tokens=40, guide=guide, logit_bias=closes)
    found = []
    for tokens in (1024, 128):
        with LLM(str(oracle.path), Layout(kvp=2), kv_cache_tokens=tokens, dtype="float32", prefix_cache=False) as llm:
            found.append(llm.generate([oracle.prompts[2], oracle.prompts[1], oracle.prompts[2]], sampling))
    assert sum(result.preemptions for result in found[0]) == 0
    assert sum(result.preemptions for result in found[1]) > 0
    assert [result.token_ids for result in found[0]] == [result.token_ids for result in found[1]]
    for result in found[1]:
        whole = "([a-f]{2}-[0-9]{2} )*"
        answer = result.text if reasoning is None else result.text.split("]", 1)[1].lstrip("\n")
        assert re.fullmatch(whole + "([a-f]{0,2}|[a-f]{2}-[0-9]{0,2})", answer)


def test_what_no_text_can_follow_is_refused_and_others_go_on(exact, native):
    prompt = native.prompts[3]
    running = exact.add(prompt, SamplingParams(10, ignore_eos=True))
    with pytest.raises(UserError, match="unclosed group"):
        exact.add(prompt, SamplingParams(guide=Guide("regex", "a(b")))
    with pytest.raises(UserError, match="can follow it"):
        exact.add(prompt, SamplingParams(guide=Guide.of_choices(["\x01"])))
    deltas = []
    while exact.has_work:
        deltas += exact.step()
    assert [delta.request_id for delta in deltas if delta.result is not None] == [running]
    assert deltas[-1].result.finish_reason == "length"


@pytest.mark.slow
def test_a_guide_that_cannot_go_on_ends_its_request_alone(native):
    """On every rank at the same token: work of a token is counted, and this grammar takes more with each."""
    sums = " | ".join(" ".join(["s"] * count) for count in range(2, 15))
    prompt, ambiguous = native.prompts[3], Guide("grammar", f'start: s\ns: "a" | "b" | {sums}')
    wants_more = {"min_tokens": 80, "guide": ambiguous}
    with LLM(str(native.path), Layout(kvp=2), batch_invariant=True, chunk_tokens=16, kv_cache_tokens=2048) as llm:
        plain = SamplingParams(40, 1.0, seed=3, logprobs=5, ignore_eos=True)
        (alone,) = llm.generate([prompt], plain)
        failing = llm.add(prompt[:9], SamplingParams(80, 1.0, seed=1, **wants_more))
        beside = llm.add(prompt, plain)
        results = {}
        while llm.has_work:
            results |= {delta.request_id: delta.result for delta in llm.step() if delta.result is not None}
        assert results[beside].token_ids == alone.token_ids
        assert results[beside].logprobs == alone.logprobs
        assert results[failing].finish_reason == "error"
        assert results[failing].error.startswith("the guide cannot be followed any further: ")
        assert re.fullmatch("[ab]+", results[failing].text)
        assert llm.generate([prompt], plain)[0].token_ids == alone.token_ids


def test_a_model_without_bytes_or_an_end_has_no_guides(tmp_path):
    made = make_oracle(NATIVE_SIZES, tmp_path)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.save(str(made.path / "tokenizer.json"))
    with LLM(str(made.path), Layout(), kv_cache_tokens=512) as llm:
        with pytest.raises(UserError, match="guides need a token that ends a text"):
            llm.add([1, 2], SamplingParams(guide=Guide("json")))
        assert llm.generate([[1, 2]], SamplingParams(3))[0].finish_reason == "length"


@pytest.fixture(scope="module")
def builtin():
    with LLM("builtin", Layout(kvp=2), kv_cache_tokens=8192, max_model_len=1024) as llm:
        yield llm


@pytest.mark.slow
def test_the_built_in_model_writes_json_that_its_schema_allows(builtin):
    """At temperature 1 with many seeds at once, two steps in flight."""
    prompt = "Describe a cat as JSON with ok, n, kind and tags: "
    asked = [SamplingParams(120, 1.0, seed=seed, guide=GUIDES[0]) for seed in range(24)]
    ids = [builtin.add(prompt, params) for params in asked]
    results = {}
    while builtin.has_work:
        results |= {delta.request_id: delta.result for delta in builtin.step() if delta.result is not None}
    ended = [results[request_id] for request_id in ids if results[request_id].finish_reason == "stop"]
    assert len(ended) > 18
    for result in ended:
        check_schema(result.text)
    assert len({result.text for result in ended}) > 12
    assert all(results[request_id].finish_reason in ("stop", "length") for request_id in ids)


def test_the_built_in_model_follows_guides_of_all_kinds(builtin):
    for guide in GUIDES[1:]:
        for sampling in (SamplingParams(60, guide=guide), SamplingParams(60, 1.3, seed=1, guide=guide)):
            (result,) = builtin.generate(["Say something: "], sampling)
            if result.finish_reason == "stop":
                is_of(guide, result.text)
    (result,) = builtin.generate(["A JSON object: "], SamplingParams(80, 0.8, seed=2, guide=Guide("json")))
    assert result.text.startswith("{")
    if result.finish_reason == "stop":
        assert isinstance(json.loads(result.text), dict)


def take_all(llm, tokens):
    while llm.has_work:
        tokens += [delta.token_id for delta in llm.step()]


@pytest.mark.slow
def test_a_guide_goes_on_in_an_engine_that_starts_again_and_new_ones_are_checked():
    """Ranks that are new know no tokens, and a request that goes on has told its guide some already."""
    params = SamplingParams(60, 1.0, seed=3, guide=Guide("regex", "([a-z]{3}-){12}[0-9]{5}"))
    with LLM("builtin", Layout(kvp=2), kv_cache_tokens=2048, max_model_len=512) as llm:
        (expected,) = llm.generate(["A word: "], params)
        tokens, result = [], None
        llm.add("A word: ", params)
        while len(tokens) < 10:
            tokens += [delta.token_id for delta in llm.step()]
        os.kill(llm.process_ids[1], signal.SIGKILL)
        with pytest.raises(EngineError):
            take_all(llm, tokens)
        llm.restart()
        while result is None:
            for delta in llm.step():
                tokens += [] if delta.token_id is None else [delta.token_id]
                result = delta.result
        assert result.token_ids == tokens
        assert (result.token_ids, result.text) == (expected.token_ids, expected.text)
        assert re.fullmatch("([a-z]{3}-){12}[0-9]{5}", result.text)
        (other,) = llm.generate(["Say: "], SamplingParams(20, 1.0, guide=Guide("regex", "[0-9]{4}")))
        assert re.fullmatch("[0-9]{4}", other.text)


def test_what_ranks_cannot_take_for_a_guide_ends_its_request_alone(oracle, tmp_path, monkeypatch):
    """It waits behind one that runs, which goes on; when it begins, it fails alone."""
    fault_file = tmp_path / "fault"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "failpoints"))
    monkeypatch.setenv("FAULT_FILE", str(fault_file))
    with LLM(str(oracle.path), Layout(kvp=2), max_running=1) as llm:
        fault_file.write_text(json.dumps({"rank": 1, "point": "tokens", "action": "raise", "always": True}))
        good = llm.add([5, 7], SamplingParams(60, ignore_eos=True))
        for _ in range(5):
            llm.step()
        bad = llm.add([8, 9] * 20, SamplingParams(24, guide=GUIDES[1]))
        results, failures = {}, []
        while len(results) < 2 and len(failures) < 5:
            try:
                results |= {delta.request_id: delta.result for delta in llm.step() if delta.result is not None}
            except EngineError:
                failures.append(set(results))
                llm.restart()
    assert failures == [{good}] * 2
    assert (results[bad].finish_reason, len(results[good].token_ids)) == ("error", 60)


def test_reasoning_before_a_guided_text_goes_on_after_a_restart(oracle):
    """Which comes inside of it: nothing comes twice, and the guide begins where it would have."""
    tags = ReasoningTags("<<", "]", is_open=True)
    bias = {TEXTS.index("]"): 3}
    sampling = SamplingParams(60, 1.0, seed=5, guide=Guide("regex", "[a-f]{20}", tags), logit_bias=bias)

    def run(kill_after):
        deltas = []
        with LLM(str(oracle.path), Layout(kvp=2), kv_cache_tokens=1024, dtype="float32") as llm:
            llm.add(oracle.prompts[2], sampling, reasoning=tags)
            while llm.has_work:
                if len(deltas) == kill_after:
                    kill_after = None
                    os.kill(llm.process_ids[1], signal.SIGKILL)
                try:
                    deltas += llm.step()
                except EngineError:
                    llm.restart()
        result = deltas[-1].result
        assert "".join(delta.reasoning or "" for delta in deltas) == result.reasoning
        assert "".join(delta.text for delta in deltas) == result.text
        return result.token_ids, result.reasoning, result.text, result.reasoning_tokens

    expected = run(None)
    assert expected[3] > 3
    assert re.fullmatch("[a-f]{20}", expected[2])
    assert run(2) == expected
