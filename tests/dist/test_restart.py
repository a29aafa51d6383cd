"""An engine that starts again after a failure: its requests go on from their tokens, whatever they asked for."""

import json
import os
import signal
from pathlib import Path

import pytest

from longhelix import LLM, EngineError, Layout, SamplingParams, UserError
from oracle import FAMILIES, make_oracle, save_tokenizer_files
from tiers import few

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("all_cores")]

SETTINGS = {"chunk_tokens": 16, "device": "cpu", "kv_cache_tokens": 2048, "max_model_len": 256}
POISON = 77
PROMPTS = [[5, 7, 11, 13] * 9, [3], [8, 9] * 20, list(range(2, 60))]
ASKED = {
    "greedy": SamplingParams(max_new_tokens=30, ignore_eos=True),
    "drawn": SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=1.0, seed=7, logprobs=2),
    "penalised": SamplingParams(max_new_tokens=30, ignore_eos=True, frequency_penalty=1.5, repetition_penalty=1.2),
    "least": SamplingParams(max_new_tokens=30, min_tokens=25),
    "scored": SamplingParams(max_new_tokens=30, ignore_eos=True, prompt_logprobs=1),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    oracle = make_oracle(FAMILIES["llama"], tmp_path_factory.mktemp("llama"))
    save_tokenizer_files(oracle.path)
    return str(oracle.path)


def run(llm, ids, results, tokens, until=lambda: False):
    """Steps until all have ended or something is so, with what each got."""
    while len(results) < len(ids) and not until():
        for delta in llm.step():
            if delta.token_id is not None:
                tokens.setdefault(delta.request_id, []).append(delta.token_id)
            if delta.result is not None:
                assert delta.request_id not in results
                results[delta.request_id] = delta.result


@pytest.mark.parametrize("layout", [Layout(kvp=2), pytest.param(Layout(pp=2), marks=pytest.mark.slow)], ids=str)
def test_requests_go_on_from_their_tokens(path, layout):
    """Killed between steps at several places: while prompts are computed, and after some tokens."""
    with LLM(path, layout, **SETTINGS) as llm:

        def add():
            return [llm.add(prompt, asked) for asked in ASKED.values() for prompt in PROMPTS]

        ids, expected = add(), {}
        run(llm, ids, expected, {})
        expected = [expected[id] for id in ids]
        ids, results, tokens = add(), {}, {}
        for count in (0, 3, 40, 41, 200):
            run(llm, ids, results, tokens, lambda count=count: sum(map(len, tokens.values())) >= count)
            os.kill(llm.process_ids[1], signal.SIGKILL)
            with pytest.raises(EngineError, match="rank 1"):
                run(llm, ids, results, tokens)
            llm.restart(most_failures=5)
        run(llm, ids, results, tokens)
        while llm.has_work:  # ranks hear of the last ends
            assert not llm.step()
        assert [rank.held for rank in llm.observe().ranks] == [0] * layout.kvp
    for id, wanted in zip(ids, expected, strict=True):
        result = results[id]
        assert (result.token_ids, result.text) == (wanted.token_ids, wanted.text)
        assert tokens[id] == wanted.token_ids
        assert result.finish_reason == wanted.finish_reason
        assert result.prompt_tokens == wanted.prompt_tokens
        for own, other in ((result.logprobs, wanted.logprobs), (result.prompt_logprobs, wanted.prompt_logprobs)):
            assert (own is None) == (other is None)
            for one, two in zip(own or (), other or (), strict=True):
                assert (one is None) == (two is None)
                assert list(one or ()) == list(two or ())
                assert list((one or {}).values()) == pytest.approx(list((two or {}).values()), abs=1e-3)


@pytest.mark.parametrize("decodes", few([True, False]))
def test_a_request_that_always_ends_a_rank_is_found_and_fails_alone(path, tmp_path, monkeypatch, decodes):
    fault_file = tmp_path / "fault"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "failpoints"))
    monkeypatch.setenv("FAULT_FILE", str(fault_file))
    sampling = SamplingParams(max_new_tokens=20, ignore_eos=True)
    with LLM(path, Layout(kvp=2), execution="eager", **SETTINGS) as llm:
        expected = [result.token_ids for result in llm.generate(PROMPTS, sampling)]
        fault = {"rank": 1, "token": POISON, "action": "kill", "decodes": decodes}
        fault_file.write_text(json.dumps(fault))
        ids, results, tokens, restarts = [], {}, {}, 0
        ids += [llm.add(prompt, sampling) for prompt in PROMPTS[:2]]
        bad = llm.add([4] * 20 + [POISON] + [4] * 30, sampling)
        ids += [llm.add(prompt, sampling) for prompt in PROMPTS[2:]]
        while len(results) < len(ids) + 1:
            try:
                run(llm, [*ids, bad], results, tokens)
            except EngineError:
                llm.restart()
                restarts += 1
        assert restarts == 2
        assert results.pop(bad).finish_reason == "error"
        assert [results[id].token_ids for id in ids] == expected
        assert [tokens[id] for id in ids] == expected


@pytest.mark.slow
def test_an_abort_reaches_a_request_that_waits_to_go_on(path):
    sampling = SamplingParams(max_new_tokens=20, ignore_eos=True)
    with LLM(path, Layout(kvp=2), **SETTINGS) as llm:
        ids, results, tokens = [llm.add(prompt, sampling) for prompt in PROMPTS], {}, {}
        run(llm, ids, results, tokens, lambda: len(tokens) == len(ids))
        os.kill(llm.process_ids[0], signal.SIGKILL)
        with pytest.raises(EngineError):
            run(llm, ids, results, tokens)
        assert llm.abort(ids[0]).finish_reason == "abort"
        llm.restart()
        gone = llm.abort(ids[3])
        assert (gone.finish_reason, gone.token_ids) == ("abort", tokens[ids[3]])
        assert llm.abort(ids[3]) is None
        left = ids[1:3]
        run(llm, left, results, tokens)
        assert sorted(results) == left
        new = llm.add(PROMPTS[0], sampling)
        assert new not in ids


def test_a_saved_context_is_loaded_again_and_not_computed(path, tmp_path):
    sampling = SamplingParams(max_new_tokens=20, ignore_eos=True)
    context = list(range(2, 66)) * 2
    with LLM(path, Layout(kvp=2), contexts_dir=str(tmp_path), **SETTINGS) as llm:
        llm.save_context("long", context)
        [expected] = llm.generate([[5, 7]], sampling, context="long")
        id, results, tokens = llm.add([5, 7], sampling, context="long"), {}, {}
        run(llm, [id], results, tokens, lambda: sum(map(len, tokens.values())) >= 5)
        os.kill(llm.process_ids[1], signal.SIGKILL)
        with pytest.raises(EngineError):
            run(llm, [id], results, tokens)
        llm.restart()
        llm.ran_steps()
        run(llm, [id], results, tokens)
        computed = sum(chunk.num_tokens for step in llm.ran_steps() for chunk in step.chunks)
        assert results[id].token_ids == tokens[id] == expected.token_ids
        assert computed <= 2 + 20 + SETTINGS["chunk_tokens"]


def test_a_rank_that_ends_while_a_context_is_loaded_loses_nobody(path, tmp_path):
    sampling, context = SamplingParams(max_new_tokens=20, ignore_eos=True), list(range(2, 66)) * 2
    settings = SETTINGS | {"contexts_dir": str(tmp_path)}
    with LLM(path, Layout(kvp=2), **settings) as llm:
        llm.save_context("long", context)
        expected = llm.generate(PROMPTS, sampling) + llm.generate([[5, 7]], sampling, context="long")
    with LLM(path, Layout(kvp=2), **settings) as llm:
        ids, results, tokens = [llm.add(prompt, sampling) for prompt in PROMPTS], {}, {}
        run(llm, ids, results, tokens, lambda: len(tokens) == len(ids))
        os.kill(llm.process_ids[1], signal.SIGKILL)
        with pytest.raises(EngineError):
            llm.add([5, 7], sampling, context="long")
        llm.restart()
        ids.append(llm.add([5, 7], sampling, context="long"))
        run(llm, ids, results, tokens)
    assert [results[id].token_ids for id in ids] == [tokens[id] for id in ids]
    assert [results[id].token_ids for id in ids] == [result.token_ids for result in expected]


def test_what_a_request_took_before_a_failure_counts_once(path):
    sampling, prompt = SamplingParams(max_new_tokens=20, ignore_eos=True), PROMPTS[0]
    with LLM(path, Layout(kvp=2), block_tokens=4, **SETTINGS) as llm:
        [first] = llm.generate([prompt], sampling)
        [expected] = llm.generate([prompt], sampling)
        assert 0 == first.cached_tokens < expected.cached_tokens < len(prompt)
        ids, results, tokens = [llm.add(prompt, sampling) for _ in range(2)], {}, {}
        run(llm, ids, results, tokens, lambda: sum(map(len, tokens.values())) >= 10)
        os.kill(llm.process_ids[0], signal.SIGKILL)
        with pytest.raises(EngineError):
            run(llm, ids, results, tokens)
        llm.restart()
        run(llm, ids, results, tokens)
    assert [results[id].cached_tokens for id in ids] == [expected.cached_tokens] * 2


def test_a_start_that_is_given_up_may_be_tried_again(path):
    def give_up(share):
        raise KeyboardInterrupt

    sampling = SamplingParams(max_new_tokens=20, ignore_eos=True)
    with LLM(path, Layout(kvp=2), **SETTINGS) as llm:
        expected = [result.token_ids for result in llm.generate(PROMPTS, sampling)]
        ids, results, tokens = [llm.add(prompt, sampling) for prompt in PROMPTS], {}, {}
        run(llm, ids, results, tokens, lambda: len(tokens) == len(ids))
        os.kill(llm.process_ids[1], signal.SIGKILL)
        with pytest.raises(EngineError):
            run(llm, ids, results, tokens)
        with pytest.raises(KeyboardInterrupt):
            llm.restart(on_load=give_up)
        with pytest.raises(UserError, match="on_load is 5"):
            llm.restart(on_load=5)
        llm.restart()
        run(llm, ids, results, tokens)
    assert [results[id].token_ids for id in ids] == [tokens[id] for id in ids] == expected


def test_what_has_not_failed_or_was_closed_does_not_start_again(path):
    with LLM(path, **SETTINGS) as llm:
        with pytest.raises(EngineError, match="has not failed"):
            llm.restart()
        for wrong in (-1, 1.5, "1", True, None):
            with pytest.raises(UserError, match="most_failures"):
                llm.restart(wrong)
        assert llm.generate([[3]], SamplingParams(max_new_tokens=2))
    with pytest.raises(EngineError, match="was closed"):
        llm.restart()


def test_what_fails_while_it_is_closed_leaves_no_rank(path, tmp_path, monkeypatch):
    def fail(*error):
        raise OSError("a disk broke")

    llm = LLM(path, Layout(kvp=2), contexts_dir=str(tmp_path), **SETTINGS)
    process_ids = llm.process_ids.values()
    saving = llm.begin_saving("long", list(range(2, 66)) * 2)
    monkeypatch.setattr(saving, "end", fail)
    monkeypatch.setattr(llm._guides, "close", fail)
    with pytest.raises(OSError, match="a disk broke"):
        llm.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in process_ids)


def test_whatever_a_request_fails_with_before_it_goes_on_ends_it_alone(path, tmp_path, monkeypatch):
    """Here its saved context, with an error that nobody expects."""

    def fail(name, cache_salt):
        raise ZeroDivisionError("unexpected")

    sampling = SamplingParams(max_new_tokens=20, ignore_eos=True)
    with LLM(path, Layout(kvp=2), contexts_dir=str(tmp_path), **SETTINGS) as llm:
        llm.save_context("long", list(range(2, 66)) * 2)
        [expected] = llm.generate([PROMPTS[0]], sampling)
        bad, good = llm.add([5, 7], sampling, context="long"), llm.add(PROMPTS[0], sampling)
        monkeypatch.setattr(llm._contexts, "load", fail)
        os.kill(llm.process_ids[1], signal.SIGKILL)
        results, restarts = {}, 0
        while len(results) < 2:
            try:
                run(llm, [bad, good], results, {})
            except (EngineError, ZeroDivisionError):
                llm.restart()
                restarts += 1
                assert restarts < 5
    assert (results[bad].finish_reason, results[good].token_ids) == ("error", expected.token_ids)
