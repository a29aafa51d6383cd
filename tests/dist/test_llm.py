"""LLM over real worker processes: results, sampling, streaming, ends."""

import gc
import itertools
import json
import os
import random
import shutil
import signal as signals
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import psutil
import pytest
import zmq
from msgspec.structs import replace

from longhelix import LLM, EngineError, Layout, SamplingParams, UserError
from longhelix.cli.generate import measurements
from longhelix.compute.runner.progress import Progress
from longhelix.engine.workers import pool, watchdog
from longhelix.engine.workers.environment import rank_environment
from longhelix.engine.workers.fork_server import server_for
from longhelix.engine.workers.process import Process
from longhelix.engine.workers.transport import Alive
from longhelix.scheduler.step import SequenceChanges, Step
from oracle import FAMILIES, WITH_EXPERTS, make_oracle, save_tokenizer_files

pytestmark = pytest.mark.dist

PROMPT = list(range(1, 38))
BLOCK_TOKENS = 16

needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler, and here is none"
)


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    made = make_oracle(FAMILIES["llama"], tmp_path_factory.mktemp("llama"), new_tokens=32)
    save_tokenizer_files(made.path)
    return made


@pytest.fixture(scope="module")
def llm(oracle):
    with LLM(str(oracle.path), Layout(kvp=2), chunk_tokens=16, kv_cache_tokens=1024) as started:
        yield started


def test_loading_tells_its_share_in_many_steps():
    """Of a model with one large tensor among many small ones, on ranks that read at the same time."""
    shares = []
    with LLM("builtin", Layout(tpa=3), max_model_len=64, on_load=shares.append):
        pass
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert max(after - before for before, after in itertools.pairwise([0, *shares])) < 0.04


def tokens_of(llm, prompt, **sampling):
    (result,) = llm.generate([prompt], SamplingParams(max_new_tokens=12, **sampling))
    return result.token_ids


def test_tokens_equal_transformers_through_processes(llm, oracle):
    results = llm.generate(oracle.prompts, SamplingParams(max_new_tokens=32))
    assert [result.token_ids for result in results] == oracle.tokens


@needs_compiler
def test_compiled_layers_warm_up_and_give_the_same_tokens(oracle):
    shares = []
    with LLM(str(oracle.path), chunk_tokens=16, execution="compiled", on_warm_up=shares.append) as compiled:
        results = compiled.generate(oracle.prompts, SamplingParams(max_new_tokens=32))
    assert [result.token_ids for result in results] == oracle.tokens
    assert shares == sorted(shares)
    assert shares[-1] == 1


@pytest.mark.slow
def test_compiled_layers_say_which_compiler_they_miss(oracle, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UserError, match=r"needs a .* compiler, but no-such-compiler is not found"):
        LLM(str(oracle.path), execution="compiled")


@pytest.fixture
def strangers(tmp_path, monkeypatch):
    """Ranks that take each other for processes of other hosts, and so exchange over gloo."""
    program = "from longhelix.compute.parallel import fabric\nfabric._share_memory = lambda hosts: False\n"
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.parametrize(("hop_b", "parts"), [(None, 1), (3, 3)])
def test_parts_over_gloo_are_the_engines_choice_and_give_the_same_tokens(strangers, oracle, tmp_path, hop_b, parts):
    """Toy contexts attend in less time than a second exchange takes to start, so that left alone there is one."""
    trace = tmp_path / "trace.json"
    with LLM(str(oracle.path), Layout(kvp=2), chunk_tokens=16, kv_cache_tokens=1024, hop_b=hop_b, trace=trace) as llm:
        results = llm.generate(oracle.prompts, SamplingParams(max_new_tokens=32))
    assert [result.token_ids for result in results] == oracle.tokens
    assert max(result.hop_b.parts for result in results) == parts
    assert all(result.hop_b.exposed_s > 0 for result in results)
    names = list(measurements(results[-1], llm.config).columns[0].cells)
    assert ("HOP-B" in names) == (parts > 1)
    exchanges = [event for event in json.loads(trace.read_text()) if event["cat"] == "exchange"]
    layers = 2
    last = results[-1].hop_b.exchanges  # it ends last, and came with the others
    assert [sum(event["pid"] == rank for event in exchanges) for rank in (0, 1)] == [layers * last] * 2
    assert max(event["args"]["part"] for event in exchanges) == parts - 1


def test_a_traced_step_has_every_phase_on_every_rank_in_order(oracle, tmp_path):
    trace = tmp_path / "trace.json"
    with LLM(str(oracle.path), Layout(kvp=2), chunk_tokens=64, trace=trace) as llm:
        (result,) = llm.generate([PROMPT], SamplingParams(max_new_tokens=3))
    assert (llm.config.execution.mode, len(result.token_ids)) == ("recorded", 3)
    events = json.loads(trace.read_text())
    layer = ["QKV", "attention", "exchange", "merge and output projection", "FFN"]
    for rank in (0, 1):
        steps = [event["name"] for event in events if event["pid"] == rank and event["cat"] == "step"]
        assert steps == ["step 1", "step 2", "step 3"]
        own = [event for event in events if event["pid"] == rank and event["cat"] in ("compute", "exchange")]
        assert [event["name"] for event in own] == ["embedding", *layer * 2, "head", "candidates"] * 3
        host = [event for event in events if event["pid"] == rank and event["cat"] == "host"]
        # That a result is sent is told with the next one.
        assert [event["name"] for event in host] == (["wait", "admit", "batch", "sampling", "send"] * 3)[:-1]
        for phases in (own, host):
            assert all(event["ph"] == "X" and event["dur"] >= 0 for event in phases)
            for before, after in itertools.pairwise(phases):
                assert before["ts"] + before["dur"] <= after["ts"] + 1e-3


def test_result_counts_follow_their_formulas(llm, oracle):
    (result,) = llm.generate([PROMPT], SamplingParams(max_new_tokens=12))
    length = len(PROMPT) + 12 - 1
    assert (result.prompt_tokens, result.finish_reason, len(result.token_ids)) == (len(PROMPT), "length", 12)
    assert len(result.tbt_s) == 11
    assert result.ttft_s > 0
    assert result.layout == {"kvp": 2, "tpa": 1, "tpf": 2, "ep": 1, "pp": 1}
    rounds = [32, length - 32]  # 48 tokens in blocks of 16: two on the first rank, one on the other
    assert sorted(result.kv_tokens_per_rank, reverse=True) == [32, 16] == rounds
    layers, heads, head_bytes = 2, 9, 16 * 4 + 4
    # Each rank sends the other one's heads: together every head once per row and layer.
    assert result.exchanged_bytes_per_token == layers * heads * head_bytes


def test_logprobs_are_the_models_own_and_chosen_is_among_them(llm):
    sampling = SamplingParams(max_new_tokens=6, temperature=1.5, top_k=50, seed=3, logprobs=4)
    (result,) = llm.generate([PROMPT], sampling)
    assert len(result.logprobs) == 6
    for token_id, logprobs in zip(result.token_ids, result.logprobs, strict=True):
        assert token_id in logprobs
        assert len(logprobs) in (4, 5)
        assert all(value <= 0 for value in logprobs.values())
        best = list(logprobs.values())[:4]
        assert best == sorted(best, reverse=True)


def test_same_seed_gives_same_tokens_alone_and_in_a_batch(llm, oracle):
    sampling = SamplingParams(max_new_tokens=12, temperature=1.0, seed=7)
    alone = tokens_of(llm, PROMPT, temperature=1.0, seed=7)
    batch = llm.generate([oracle.prompts[3], PROMPT, oracle.prompts[2]], sampling)
    assert batch[1].token_ids == alone
    assert tokens_of(llm, PROMPT, temperature=1.0, seed=8) != alone
    assert tokens_of(llm, PROMPT, temperature=1.0) != tokens_of(llm, PROMPT, temperature=1.0)


def test_repetition_penalty_ends_repetition(llm):
    tokens = tokens_of(llm, PROMPT, repetition_penalty=100.0)
    assert len(set(tokens)) == len(tokens)


def test_stop_token_and_stop_string_end_before_themselves(llm):
    free = tokens_of(llm, PROMPT)
    cut = next(i for i, token in enumerate(free) if token not in free[:i] and i > 2)
    (by_id,) = llm.generate([PROMPT], SamplingParams(max_new_tokens=12, stop_token_ids=(free[cut],)))
    assert (by_id.token_ids, by_id.finish_reason) == (free[:cut], "stop")
    (by_text,) = llm.generate([PROMPT], SamplingParams(max_new_tokens=12, stop=(f"w{free[cut]}",)))
    assert by_text.finish_reason == "stop"
    assert by_text.text.split() == [f"w{token}" for token in free[:cut]]
    assert by_text.token_ids == free[: cut + 1]
    assert (by_id.ending_token_id, by_text.ending_token_id) == (free[cut], None)
    shows = {"max_new_tokens": 12, "include_stop_str_in_output": True}
    (by_id,) = llm.generate([PROMPT], SamplingParams(stop_token_ids=(free[cut],), **shows))
    assert by_id.token_ids == free[:cut]
    (by_text,) = llm.generate([PROMPT], SamplingParams(stop=(f"w{free[cut]}",), **shows))
    assert by_id.text.split() == by_text.text.split() == [f"w{token}" for token in free[: cut + 1]]


@pytest.mark.parametrize("name", ["skip_special_tokens", "include_stop_str_in_output"])
@pytest.mark.parametrize("wrong", [None, 1, "yes"])
def test_what_a_text_shows_is_true_or_false(name, wrong):
    with pytest.raises(UserError, match=f"{name} is .*: set it to True or False"):
        SamplingParams(**{name: wrong})


def test_stop_strings_are_not_looked_for_among_the_least_tokens(llm):
    free = tokens_of(llm, PROMPT)
    cut = next(i for i, token in enumerate(free) if token not in free[:i] and i > 2)
    stop = f"w{free[cut]}"
    for least in (cut, cut + 1, 12):
        (result,) = llm.generate([PROMPT], SamplingParams(max_new_tokens=12, stop=(stop,), min_tokens=least))
        found = next((i for i in range(least, 12) if f"w{free[i]}".startswith(stop)), None)
        assert result.finish_reason == ("length" if found is None else "stop")
        assert result.token_ids == (free if found is None else free[: found + 1])
        assert result.text.split() == [f"w{token}" for token in free[:found]]


def test_streamed_text_is_the_result_text(llm):
    deltas = list(llm.stream(PROMPT, SamplingParams(max_new_tokens=12)))
    assert "".join(delta.text for delta in deltas) == deltas[-1].result.text
    assert [delta.result is None for delta in deltas] == [True] * 11 + [False]


def joined(deltas):
    """The token ids and logprobs of deltas, as a result has them."""
    tokens = [delta for delta in deltas if delta.token_id is not None]
    return [delta.token_id for delta in tokens], [delta.logprobs for delta in tokens]


@pytest.mark.parametrize("end", ["length", "stop token", "stop string"])
def test_deltas_say_which_tokens_and_logprobs_of_the_result_they_are_of(llm, end):
    """What ends an answer is no token of it, but the one that completes a stop string is."""
    free = tokens_of(llm, PROMPT)
    cut = next(i for i, token in enumerate(free) if token not in free[:i] and i > 2)
    stop = {"stop token": {"stop_token_ids": (free[cut],)}, "stop string": {"stop": (f"w{free[cut]}",)}}.get(end, {})
    *begin, last = llm.stream(PROMPT, SamplingParams(max_new_tokens=12, logprobs=2, **stop))
    assert (last.token_id is None) == (end == "stop token")
    assert len(last.result.token_ids) == {"length": 12, "stop token": cut, "stop string": cut + 1}[end]
    assert joined([*begin, last]) == (last.result.token_ids, last.result.logprobs)
    assert all(delta.token_id in delta.logprobs for delta in begin)


def test_deltas_have_no_logprobs_where_nobody_asked(llm):
    deltas = list(llm.stream(PROMPT, SamplingParams(max_new_tokens=4)))
    assert joined(deltas) == (deltas[-1].result.token_ids, [None] * 4)


def test_the_end_after_an_abort_has_no_token(llm):
    stream = llm.stream(PROMPT, SamplingParams(max_new_tokens=12, logprobs=0))
    deltas = [next(stream), next(stream)]
    llm.abort(deltas[0].request_id)
    deltas += stream
    assert (deltas[-1].token_id, deltas[-1].logprobs) == (None, None)
    assert joined(deltas) == (deltas[-1].result.token_ids, deltas[-1].result.logprobs)
    run_all(llm)


def test_streams_are_read_in_any_order_beside_other_requests(llm, oracle):
    """Each gets its own deltas, whoever runs the engine meanwhile."""
    sampling = SamplingParams(max_new_tokens=32)
    added = llm.add(oracle.prompts[0], sampling)
    streams = [llm.stream(prompt, sampling) for prompt in oracle.prompts[1:]]
    texts, results = [""] * 3, {}
    for turn in range(32):
        for index in random.Random(turn).sample(range(3), 3):
            delta = next(streams[index])
            texts[index] += delta.text
            results[index] = delta.result
        if turn == 15:
            (whole,) = llm.generate([oracle.prompts[2]], sampling)
    assert all(list(stream) == [] for stream in streams)
    assert [results[index].token_ids for index in range(3)] == oracle.tokens[1:]
    assert [results[index].text for index in range(3)] == texts
    assert whole.token_ids == oracle.tokens[2]
    deltas = llm.step()  # nobody has asked for these before
    assert {delta.request_id for delta in deltas} == {added}
    assert deltas[-1].result.token_ids == oracle.tokens[0]
    assert "".join(delta.text for delta in deltas) == deltas[-1].result.text


@pytest.mark.parametrize("leave", ["close", "drop", "with", "never read"])
def test_a_stream_that_is_left_aborts_its_request_and_frees_its_kv(llm, leave):
    free = [allocator.available for allocator in llm._core._loop.scheduler.pool.allocators]
    stream = llm.stream(PROMPT, SamplingParams(max_new_tokens=90))
    if leave != "never read":
        next(stream)
        assert [allocator.available for allocator in llm._core._loop.scheduler.pool.allocators] != free
    if leave == "close":
        stream.close()
        assert list(stream) == []
    elif leave == "with":
        with stream:
            next(stream)
    else:
        del stream
    run_all(llm)
    assert [allocator.available for allocator in llm._core._loop.scheduler.pool.allocators] == free
    assert not llm._live


def test_an_interrupt_inside_a_step_ends_the_engine(oracle, monkeypatch):
    """Ranks and engine would be at odds; whoever asks later hears why."""
    llm = LLM(str(oracle.path), Layout(kvp=2))
    process_ids, directory = children_and_sockets(llm)
    done = llm.add(PROMPT, SamplingParams(max_new_tokens=1))
    stream = llm.stream(PROMPT, SamplingParams(max_new_tokens=90))
    next(stream)
    received = itertools.count()

    def interrupted(*deadline_s):
        if next(received) == 5:
            raise KeyboardInterrupt
        return receive(*deadline_s)

    receive = llm._core._pool._receive
    monkeypatch.setattr(llm._core._pool, "_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT, PROMPT], SamplingParams(max_new_tokens=90))
    assert_nothing_left(process_ids, directory)
    (delta,) = llm.step()  # what had ended before is not lost
    assert (delta.request_id, delta.result.finish_reason) == (done, "length")
    for ask in (llm.step, lambda: list(stream), lambda: llm.generate([PROMPT])):
        with pytest.raises(EngineError, match="the engine has ended: KeyboardInterrupt"):
            ask()


def test_an_interrupted_add_leaves_the_others_running(llm, monkeypatch):
    other = llm.stream(PROMPT, SamplingParams(max_new_tokens=12))
    queue = llm._core.queue

    def interrupted(*arguments):
        queue(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(llm._core, "queue", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.add(PROMPT, SamplingParams(max_new_tokens=90))
    monkeypatch.undo()
    assert len([*other][-1].result.token_ids) == 12
    run_all(llm)
    assert not llm.has_work


def test_a_request_that_nothing_runs_for_is_said_and_not_waited_for(llm, monkeypatch):
    stream = llm.stream(PROMPT, SamplingParams(max_new_tokens=4))
    monkeypatch.setattr(llm._core._loop.scheduler, "schedule", lambda now_s, busy: None)
    with pytest.raises(EngineError, match="the engine has nothing to run"):
        next(stream)
    monkeypatch.undo()
    stream.close()
    run_all(llm)


@pytest.mark.slow
def test_a_stream_that_the_collector_drops_in_the_middle_of_a_step_is_aborted_before_the_next(llm, monkeypatch):
    free = [allocator.available for allocator in llm._core._loop.scheduler.pool.allocators]
    other = llm.stream(PROMPT, SamplingParams(max_new_tokens=12))
    dropped = llm.stream(PROMPT, SamplingParams(max_new_tokens=90))
    next(dropped)
    cycle = [dropped]
    cycle.append(cycle)
    del dropped, cycle
    take = llm._take

    def collect_and_take(*stepped):
        gc.collect()
        take(*stepped)

    monkeypatch.setattr(llm, "_take", collect_and_take)
    assert len([*other][-1].result.token_ids) == 12
    assert not llm._live
    run_all(llm)
    assert [allocator.available for allocator in llm._core._loop.scheduler.pool.allocators] == free


def test_a_request_that_is_aborted_by_its_id_ends_its_stream(llm):
    stream, other = (llm.stream(PROMPT, SamplingParams(max_new_tokens=12)) for _ in range(2))
    first = next(stream)
    assert llm.abort(first.request_id).finish_reason == "abort"
    rest = list(stream)
    assert [delta.result is None for delta in rest[-2:]][-1:] == [False]
    assert rest[-1].result.finish_reason == "abort"
    assert len(rest) <= 2  # no step ran for it
    assert len(list(other)[-1].result.token_ids) == 12
    added = llm.add(PROMPT, SamplingParams(max_new_tokens=12))
    next(llm.stream(PROMPT, SamplingParams(max_new_tokens=12)))
    assert llm.abort(added).finish_reason == "abort"
    assert all(delta.request_id != added for delta in llm.step())
    run_all(llm)


class BrokenText:
    """Text that cannot be made of the fourth token."""

    def __init__(self, *given):
        self.pushed = 0

    def push(self, token_id):
        self.pushed += 1
        if self.pushed == 4:
            raise ValueError("no such byte")
        return "x"

    def finish(self):
        raise ValueError("no end")


@pytest.mark.parametrize(("max_new_tokens", "words"), [(12, "no such byte"), (3, "no end")])
def test_text_that_fails_ends_its_request_alone(llm, oracle, monkeypatch, max_new_tokens, words):
    free = [allocator.available for allocator in llm._core._loop.scheduler.pool.allocators]
    others = [llm.stream(prompt, SamplingParams(max_new_tokens=32)) for prompt in oracle.prompts]
    monkeypatch.setattr(llm.tokenizer, "stream", BrokenText)
    broken = llm.stream(PROMPT, SamplingParams(max_new_tokens=max_new_tokens))
    monkeypatch.undo()
    *begin, last = broken
    assert (last.result.finish_reason, last.result.error) == ("error", f"ValueError: {words}")
    assert joined([*begin, last])[0] == last.result.token_ids
    assert [list(stream)[-1].result.token_ids for stream in others] == oracle.tokens
    run_all(llm)
    assert [allocator.available for allocator in llm._core._loop.scheduler.pool.allocators] == free


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        ([1, 2.0], {}, "a prompt token is 2.0"),
        (5, {}, "a prompt is 5"),
        ("\ud800", {}, "half a surrogate pair"),
        (PROMPT, {"stop_token_ids": (10**6,)}, "stop token id 1000000 is outside the model's vocabulary"),
        (PROMPT, {"logit_bias": {10**6: 1}}, "logit_bias: token id 1000000 is outside the model's vocabulary of 199"),
        (PROMPT, {"stop_token_ids": tuple(range(199)), "min_tokens": 1}, "every token .* is a stop token"),
    ],
)
def test_what_cannot_be_served_is_refused_and_the_next_request_runs(llm, prompt, settings, words):
    with pytest.raises(UserError, match=words):
        llm.add(prompt, SamplingParams(**settings))
    with pytest.raises(UserError, match="give SamplingParams"):
        llm.add(PROMPT, {"max_new_tokens": 4})
    assert not llm._live
    assert len(tokens_of(llm, PROMPT)) == 12


class Unwalked(dict):
    """Requests of which a step may look up some, and not go through all."""

    def _refused(self, *arguments):
        raise AssertionError("a step goes through all requests, those in the queue as well")

    __iter__ = values = items = keys = _refused


def test_no_step_touches_requests_that_only_wait(llm, oracle):
    waiting = [llm.add(PROMPT, SamplingParams(max_new_tokens=4)) for _ in range(100)]  # more than run at a time
    llm._live = Unwalked(llm._live)
    try:
        for _ in range(3):
            llm.step()
    finally:
        llm._live = dict(dict.items(llm._live))
    for request_id in waiting:
        llm.abort(request_id)
    run_all(llm)


def test_a_step_that_cannot_be_sent_ends_the_engine_in_words(oracle, monkeypatch):
    llm = LLM(str(oracle.path), Layout(kvp=2))
    process_ids, directory = children_and_sockets(llm)
    llm.add(PROMPT, SamplingParams(max_new_tokens=4))
    schedule = llm._core._loop.scheduler.schedule
    monkeypatch.setattr(llm._core._loop.scheduler, "schedule", lambda *asked: replace(schedule(*asked), id=10**20))
    with pytest.raises(EngineError, match=r"step 1\d+ cannot be sent: OverflowError"):
        run_all(llm)
    assert_nothing_left(process_ids, directory)


def test_requests_come_and_go_and_others_do_not_notice(llm, oracle):
    """Adds and aborts in all phases; every survivor's tokens equal those it gets alone."""
    rng = random.Random(0)
    sampling = SamplingParams(max_new_tokens=32)
    ids = {llm.add(prompt, sampling): index for index, prompt in enumerate(oracle.prompts)}
    doomed = [llm.add(PROMPT, sampling) for _ in range(3)]
    results = {}
    while llm.has_work:
        for delta in llm.step():
            if delta.result:
                results[delta.request_id] = delta.result
        if doomed and rng.random() < 0.3:
            aborted = llm.abort(doomed.pop())
            assert aborted.finish_reason == "abort"
    assert {index: results[i].token_ids for i, index in ids.items()} == dict(enumerate(oracle.tokens))
    assert llm.abort(next(iter(ids))) is None


def test_requests_are_placed_by_their_lengths(oracle):
    """Side by side: short ones on a rank each, one that outgrows the threshold on two, a long one striped."""
    with LLM(
        str(oracle.path), Layout(kvp=2), placement="auto", kvp_threshold_tokens=40, chunk_tokens=16, kv_cache_tokens=512
    ) as llm:
        assert [len(prompt) for prompt in oracle.prompts] == [1, 3, 18, 41]
        results = llm.generate(oracle.prompts, SamplingParams(max_new_tokens=32))
    assert [result.token_ids for result in results] == oracle.tokens
    short, other, growing, long = [result.kv_tokens_per_rank for result in results]
    assert sorted(short) == [0, 1 + 31]
    assert sorted(other) == [0, 3 + 31]
    assert short.index(0) != other.index(0)
    assert sorted(growing) == [18 + 31 - 32, 32]  # 40 tokens a rank, in blocks of 16
    assert sorted(long) == [32, 41 + 31 - 32]


def test_more_requests_than_the_pool_holds_wait_and_finish(oracle):
    with LLM(str(oracle.path), Layout(kvp=2), kv_cache_tokens=160) as llm:
        results = llm.generate([oracle.prompts[3]] * 5, SamplingParams(max_new_tokens=32))
    assert [result.token_ids for result in results] == [oracle.tokens[3]] * 5


def test_request_beyond_the_pool_is_refused_in_words(llm):
    with pytest.raises(UserError, match="kv-cache-tokens") as refused:
        LLM(llm.config.model_path, kv_cache_tokens=32).generate([PROMPT], SamplingParams(max_new_tokens=12))
    assert refused.value.code == "kv_cache_exceeded"
    with pytest.raises(UserError, match="--max-model-len") as refused:
        llm.add(PROMPT, SamplingParams(max_new_tokens=1000))
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(UserError, match="empty"):
        llm.add([])
    with pytest.raises(UserError, match="vocabulary"):
        llm.add([10**6])


def test_one_refused_prompt_refuses_the_batch_and_leaves_no_request(llm):
    with pytest.raises(UserError, match="empty"):
        llm.generate([PROMPT, []], SamplingParams(max_new_tokens=4))
    while llm.has_work:
        assert llm.step() == []
    with pytest.raises(UserError, match="tuple"):
        SamplingParams(stop="w1")


def children_and_sockets(llm):
    return list(llm.process_ids.values()), llm._core._pool._processes.directory


def run_all(llm):
    while llm.has_work:
        llm.step()


def assert_nothing_left(process_ids, directory):
    assert not any(psutil.pid_exists(pid) for pid in process_ids)
    assert not directory.exists()


@pytest.mark.parametrize(
    ("layout", "victim"),
    [
        (Layout(kvp=2), 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((Layout(pp=2), 0), (Layout(kvp=2, tpa=2), 3), (Layout(kvp=2, pp=2), 3))
        ),
    ],
)
@pytest.mark.parametrize(("signal", "words"), [("SIGKILL", "SIGKILL"), ("SIGSTOP", "not answered")])
def test_worker_that_dies_or_stops_ends_the_engine_with_its_name(oracle, layout, victim, signal, words):
    llm = LLM(str(oracle.path), layout)
    process_ids, directory = children_and_sockets(llm)
    llm.add(PROMPT, SamplingParams(max_new_tokens=80))
    for _ in range(5):
        llm.step()
    os.kill(llm.process_ids[victim], getattr(signals, signal))
    before = time.monotonic()
    with pytest.raises(EngineError, match=f"rank {victim} .*{words}"):
        run_all(llm)
    assert time.monotonic() - before < 12
    assert_nothing_left(process_ids, directory)
    with pytest.raises(EngineError, match="ended"):
        llm.generate([PROMPT], SamplingParams(max_new_tokens=4))


@pytest.fixture
def stuck_rank(tmp_path, monkeypatch):
    """Rank 1's main thread stands still in its fourth step, while its heart goes on."""
    program = """
import sys, time
from longhelix.compute.runner.runner import ModelRunner
forward = ModelRunner.forward
def stand(runner, step):
    if runner.mesh.rank == 1 and step.id == 4:
        time.sleep(600)
    return forward(runner, step)
ModelRunner.forward = stand
"""
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_a_rank_that_stands_still_is_named_with_its_step(stuck_rank, oracle):
    llm = LLM(str(oracle.path), Layout(kvp=2))
    process_ids, directory = children_and_sockets(llm)
    before_s = time.monotonic()
    with pytest.raises(EngineError, match=r"rank 1 is stuck in step 4, outside collectives.*rank 0 is in "):
        llm.generate([PROMPT], SamplingParams(max_new_tokens=12))
    assert time.monotonic() - before_s < 30
    assert_nothing_left(process_ids, directory)


STANDS = """
import time
from longhelix.compute.runner import rank, runner
{name} = {owner}.{name}
def stand(first, *arguments):
    if {rank} == 1:
        time.sleep(600)
    return {name}(first, *arguments)
{owner}.{name} = stand
"""


@pytest.mark.slow  # test_watchdog has what it decides and says
@pytest.mark.parametrize(
    ("owner", "name", "rank", "execution"),
    [
        pytest.param("rank", "load_model", "arguments[0].rank", "recorded", id="load"),
        pytest.param(
            "runner.ModelRunner", "forward", "first.mesh.rank", "compiled", id="warm-up", marks=needs_compiler
        ),
    ],
)
def test_ranks_that_stand_still_while_they_start_end_the_engine(
    oracle, tmp_path, monkeypatch, owner, name, rank, execution
):
    (tmp_path / "sitecustomize.py").write_text(STANDS.format(owner=owner, name=name, rank=rank))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(watchdog, "START_S", 10.0)
    place = "" if name == "load_model" else r".*; rank 0 is in "
    with pytest.raises(EngineError, match=rf"rank 1 is stuck in its start, outside collectives{place}"):
        LLM(str(oracle.path), Layout(kvp=2), execution=execution)


@pytest.mark.slow  # it waits for what takes long
def test_ranks_may_take_long_before_they_can_give_a_sign(oracle, tmp_path, monkeypatch):
    """Importing torch from a slow disk."""
    program = "import sys, time; time.sleep(8 * ('longhelix.engine.workers.worker' in sys.orig_argv))"
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(pool, "_LOADING_SILENCE_S", 4.0)
    with LLM(str(oracle.path)) as llm:
        assert llm.generate("Hi", SamplingParams(max_new_tokens=1))[0].finish_reason == "length"


@pytest.mark.slow  # test_watchdog has what it decides and says
def test_ranks_that_do_not_say_what_their_experts_had_end_the_engine(tmp_path, tmp_path_factory, monkeypatch):
    program = """
import time
from longhelix.compute.models.decoder import Decoder
Decoder.expert_rows = lambda model: time.sleep(600)
"""
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    mixtral = make_oracle(WITH_EXPERTS["mixtral"], tmp_path_factory.mktemp("mixtral"))
    save_tokenizer_files(mixtral.path)
    llm = LLM(str(mixtral.path))
    process_ids, directory = children_and_sockets(llm)
    with pytest.raises(EngineError, match=r"ranks \[0\] do not answer"):
        llm.expert_load()
    assert_nothing_left(process_ids, directory)


@pytest.fixture
def one_rank_without_packed_kernels(tmp_path, monkeypatch):
    program = """
from dataclasses import replace
from longhelix.compute.runner import rank
found = rank.rank_capabilities
rank.rank_capabilities = lambda mesh, *parts: replace(found(mesh, *parts), packed=mesh.rank != 1)
"""
    (tmp_path / "sitecustomize.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.slow
def test_one_rank_with_reference_kernels_gives_all_ranks_more_time(one_rank_without_packed_kernels, oracle):
    with LLM(str(oracle.path), Layout(kvp=2)) as llm:
        assert not llm._core._pool._watchdog._packed


def test_ranks_listen_on_loopback_alone(llm):
    addresses = {
        connection.laddr.ip
        for pid in llm.process_ids.values()
        for connection in psutil.Process(pid).net_connections("inet")
    }
    assert addresses
    assert all(address in ("127.0.0.1", "::1", "::ffff:127.0.0.1") for address in addresses), addresses


def test_worker_that_raises_is_named_with_its_cause(oracle):
    """Work on a sequence that no rank has heard of."""
    llm = LLM(str(oracle.path), Layout(kvp=2))
    process_ids, directory = children_and_sockets(llm)
    llm._core._pool.submit(Step(1, changes=SequenceChanges(joining=(99,))))
    with pytest.raises(EngineError, match=r"rank [01] failed: KeyError: 99"):
        llm._core._pool.collect()
    assert_nothing_left(process_ids, directory)


def test_closing_ends_every_process_and_may_be_repeated(oracle):
    llm = LLM(str(oracle.path), Layout(kvp=2))
    process_ids, directory = children_and_sockets(llm)
    llm.close()
    llm.close()
    assert_nothing_left(process_ids, directory)


def assert_ended(llm, why):
    """Whoever asks hears why, each time in the same words."""
    for ask in (
        lambda: llm.add(PROMPT),
        llm.step,
        llm.step,
        lambda: llm.stream(PROMPT),
        lambda: llm.generate([PROMPT]),
    ):
        with pytest.raises(EngineError) as caught:
            ask()
        assert str(caught.value) == f"the engine has ended: {why}: make a new one"


def test_a_closed_engine_says_so(oracle):
    llm = LLM(str(oracle.path))
    llm.add(PROMPT, SamplingParams(max_new_tokens=9))
    llm.close()
    assert_ended(llm, "it was closed")


def test_an_engine_that_ended_while_it_counted_rows_says_why(tmp_path, monkeypatch):
    mixtral = make_oracle(WITH_EXPERTS["mixtral"], tmp_path, prompt_lengths=(1,))
    save_tokenizer_files(mixtral.path)
    llm = LLM(str(mixtral.path))
    process_ids, directory = children_and_sockets(llm)
    monkeypatch.setattr(llm._core._pool, "_receive", Mock(side_effect=KeyboardInterrupt("enough")))
    with pytest.raises(KeyboardInterrupt):
        llm.expert_load()
    assert_nothing_left(process_ids, directory)
    assert_ended(llm, "KeyboardInterrupt: enough")
    with pytest.raises(EngineError, match="the engine has ended: KeyboardInterrupt: enough: make a new one"):
        llm.expert_load()


@pytest.mark.parametrize("fault", ["interrupt", "send"])
def test_closing_that_goes_wrong_half_way_leaves_nothing(oracle, monkeypatch, fault):
    """Ranks that do not end by themselves, and a second Ctrl-C in the wait for them; or nothing can be sent."""
    llm = LLM(str(oracle.path), Layout(kvp=2))
    process_ids, directory = children_and_sockets(llm)
    if fault == "send":
        monkeypatch.setattr(llm._core._pool._socket, "send", Mock(side_effect=zmq.ZMQError))
        llm.close()
    else:
        monkeypatch.setattr(llm._core._pool._socket, "send", Mock())
        processes = llm._core._pool._processes
        interrupted = Mock(wraps=processes.wait, side_effect=[KeyboardInterrupt, DEFAULT, DEFAULT])
        monkeypatch.setattr(processes, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.close()
        monkeypatch.undo()
    llm.close()
    assert_nothing_left(process_ids, directory)


def test_closing_interrupted_while_it_reaps_may_be_repeated(oracle, monkeypatch):
    llm = LLM(str(oracle.path))
    process_ids, directory = children_and_sockets(llm)
    monkeypatch.setattr(Process, "wait", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        llm.close()
    monkeypatch.undo()
    llm.close()
    assert_nothing_left(process_ids, directory)


def test_a_rank_that_dies_among_signs_of_life_is_noticed(oracle, monkeypatch):
    """Of so many ranks that there is always one: the engine is never left without a message."""
    llm = LLM(str(oracle.path), Layout(kvp=2))
    alive = llm._core._pool._socket.receive

    def receive(timeout_s):
        time.sleep(0.01)
        return alive(0) or (0, Alive(Progress()))

    monkeypatch.setattr(llm._core._pool._socket, "receive", receive)
    llm.add(PROMPT, SamplingParams(max_new_tokens=80))
    llm.step()
    os.kill(llm.process_ids[1], signals.SIGKILL)
    with pytest.raises(EngineError, match=r"rank 1 .* was ended by SIGKILL"):
        run_all(llm)


def test_an_engine_that_nobody_holds_ends_at_once(oracle, tmp_path):
    llm = LLM(str(oracle.path), Layout(kvp=2), trace=tmp_path / "trace.json")
    process_ids, directory = children_and_sockets(llm)
    gc.disable()
    try:
        del llm
        assert_nothing_left(process_ids, directory)
    finally:
        gc.enable()
    assert json.loads((tmp_path / "trace.json").read_text()) == []


def test_an_engine_in_a_cycle_is_ended_by_the_collector(oracle):
    llm = LLM(str(oracle.path))
    process_ids, directory = children_and_sockets(llm)
    llm.itself = llm
    del llm
    gc.collect()
    assert_nothing_left(process_ids, directory)


def test_worker_whose_parent_is_gone_before_it_is_up_ends_itself(tmp_path):
    """Started for a parent that is not its own, as one is that outlived its engine while it imported torch."""
    directory = tmp_path / "sockets"
    directory.mkdir()
    arguments = ["--rank", "0", "--directory", str(directory), "--parent", "1"]
    worker = server_for(rank_environment()).start(["longhelix.engine.workers.worker", *arguments])
    assert worker.wait(60) == 1
    worker.close()
    assert not directory.exists()


def test_workers_end_when_the_engine_is_killed(oracle):
    program = (
        "import sys\nfrom longhelix import LLM, Layout\n"
        f"llm = LLM({str(oracle.path)!r}, Layout(kvp=2))\n"
        "print(*llm.process_ids.values(), llm._core._pool._processes.directory, flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        *process_ids, directory = engine.stdout.readline().decode().split()
        engine.kill()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(psutil.pid_exists(int(pid)) for pid in process_ids):
        time.sleep(0.1)
    assert_nothing_left([int(pid) for pid in process_ids], Path(directory))
