"""The token core: token ids in, events out, driven by one thread that never waits longer than it wants to."""

import os
import signal
import time
from array import array
from contextlib import closing
from dataclasses import replace

import pytest

from longhelix import LLM, EngineError, Layout, SamplingParams, UserError
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.engine.core import TokenCore
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import resolve
from longhelix.engine.workers import pool
from oracle import FAMILIES, make_oracle, save_tokenizer_files
from tiers import few

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("all_cores")]

PROMPTS = [[5, 7, 11, 13] * 9, [3], [8, 9] * 20]

ENDS = """
import os, signal
from longhelix.compute.runner.runner import ModelRunner
forward = ModelRunner.forward
def end(runner, step):
    if runner.mesh.rank == 1:
        {program}
    return forward(runner, step)
ModelRunner.forward = end
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    oracle = make_oracle(FAMILIES["llama"], tmp_path_factory.mktemp("llama"))
    save_tokenizer_files(oracle.path)
    return str(oracle.path)


@pytest.fixture
def core(path):
    core = TokenCore(resolve(open_checkpoint(path), Layout(kvp=2), EngineOptions(chunk_tokens=16, device="cpu")))
    yield core
    core.close()


def drain(core):
    """Tokens and reasons of all requests, by id."""
    tokens, reasons = {}, {}
    while core.has_work:
        for event in core.poll(0.05):
            if event.sampled is not None:
                tokens.setdefault(event.request_id, []).append(event.sampled.token_id)
            if event.finish_reason is not None:
                reasons[event.request_id] = event.finish_reason
    return tokens, reasons


def poll_now_and_then(core):
    for _ in range(3000):
        core.poll(0)
        time.sleep(0.01)


def test_its_tokens_are_those_of_the_llm_and_its_counters_those_of_its_steps(core, path):
    sampling = SamplingParams(max_new_tokens=9, ignore_eos=True)
    ids = [core.add(array("i", prompt), sampling).id for prompt in PROMPTS]
    tokens, reasons = drain(core)
    with LLM(path, Layout(kvp=2), chunk_tokens=16, device="cpu") as llm:
        results = llm.generate(PROMPTS, sampling)
    assert [tokens[id] for id in ids] == [result.token_ids for result in results]
    assert set(reasons.values()) == {"length"}
    assert core.counters.rows == sum(len(prompt) + 9 - 1 for prompt in PROMPTS)
    assert core.counters.exchanged_bytes > 0
    assert core.poll() == core.poll(0) == []  # there is nothing to do


def test_it_waits_no_longer_than_it_is_asked_to(core):
    core.add(array("i", PROMPTS[0]), SamplingParams(max_new_tokens=4, ignore_eos=True))
    for pid in core.process_ids.values():
        os.kill(pid, signal.SIGSTOP)
    try:
        start_s = time.monotonic()
        assert core.poll(0) == []
        assert core.poll(0.3) == []
        waited_s = time.monotonic() - start_s
    finally:
        for pid in core.process_ids.values():
            os.kill(pid, signal.SIGCONT)
    assert 0.3 <= waited_s < 30
    tokens, _ = drain(core)
    assert [len(found) for found in tokens.values()] == [4]


@pytest.mark.parametrize(
    ("program", "words"),
    few(
        [
            ("os.kill(os.getpid(), signal.SIGSTOP)", "rank 1 has not answered for"),
            ("os._exit(0)", r"rank 1 \(process \d+\) ended with status 0"),
        ]
    ),
)
def test_a_rank_that_is_gone_is_told_to_whoever_polls_without_waiting(path, tmp_path, monkeypatch, program, words):
    """As a server does: other work between one poll and the next."""
    (tmp_path / "sitecustomize.py").write_text(ENDS.format(program=program))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(pool, "SILENCE_S", 4.0)  # before the watchdog on steps has had enough
    with closing(TokenCore(resolve(open_checkpoint(path), Layout(kvp=2), EngineOptions(device="cpu")))) as core:
        core.add(array("i", PROMPTS[0]), SamplingParams(max_new_tokens=4))
        with pytest.raises(EngineError, match=words):
            poll_now_and_then(core)


@pytest.mark.slow
def test_an_aborted_request_has_no_more_events(core):
    aborted, other = (core.add(array("i", PROMPTS[0]), SamplingParams(max_new_tokens=30)).id for _ in range(2))
    while not core.poll():
        pass
    assert sum(core.abort(aborted).kv_tokens_per_rank) > 0
    assert core.abort(aborted) is None
    tokens, reasons = drain(core)
    assert aborted not in tokens
    assert list(reasons) == [other]


class Watched:
    """The pool of a core: which steps are sent while others have not ended, and whether blocks come back too early."""

    def __init__(self, pool):
        self._pool, self._in_flight, self.sent = pool, [], []

    def submit(self, step):
        self.sent.append((bool(self._in_flight), any(ahead.chunks for ahead in self._in_flight)))
        self._in_flight.append(step)
        self._pool.submit(step)

    def collect(self, timeout_s):
        result = self._pool.collect(timeout_s)
        if result is not None:
            assert self._in_flight.pop(0).id == result.step_id
        return result


def test_a_step_is_sent_while_the_last_one_runs_unless_that_has_chunks(core):
    watched = core._loop._runner = Watched(core._pool)
    for prompt in PROMPTS:
        core.add(array("i", prompt), SamplingParams(max_new_tokens=9, ignore_eos=True))
    drain(core)
    early = [sent for sent in watched.sent if sent[0]]
    assert len(early) >= 7  # nearly all steps of decodes
    assert not any(behind_chunks for _, behind_chunks in early)


@pytest.mark.slow
def test_tokens_of_steps_in_flight_are_those_of_steps_one_by_one(core):
    """Ends by stop tokens and lengths, and aborts, while the next step is under way: no token after an end, and what
    was freed is taken again meanwhile."""
    sampling = SamplingParams(max_new_tokens=25, temperature=1.0, seed=3, ignore_eos=True)
    asked = [(prompt, replace(sampling, seed=seed)) for seed in range(3) for prompt in PROMPTS]
    runs = []
    for depth in (1, 2, 3):
        core._loop._depth = depth
        free = [core.add(array("i", prompt), params).id for prompt, params in asked]
        tokens, _ = drain(core)
        stops = [tokens[id][7 + index] for index, id in enumerate(free)]
        ids = [
            core.add(array("i", prompt), replace(params, stop_token_ids=(stop,))).id
            for (prompt, params), stop in zip(asked, stops, strict=True)
        ]
        aborted, late = ids[4], core.add(array("i", PROMPTS[0]), sampling).id
        ended, stopped = set(), {}
        while core.has_work:
            for event in core.poll(0.05):
                assert event.request_id not in ended
                if event.sampled is not None:
                    stopped.setdefault(event.request_id, []).append(event.sampled.token_id)
                if event.finish_reason is not None:
                    ended.add(event.request_id)
            if aborted not in ended and len(stopped.get(aborted, ())) >= 4:
                core.abort(aborted)
                ended.add(aborted)
        assert len(ended) == len(ids) + 1
        kept = [stopped.get(id, []) for id in (*ids, late) if id != aborted]
        runs.append(([tokens[id] for id in free], kept))
        scheduler = core._loop.scheduler
        assert {allocator.available for allocator in scheduler.pool.allocators} == {scheduler.config.num_blocks}
    assert runs[1] == runs[2] == runs[0]
    for whole, kept in zip(runs[0][0], [*runs[0][1][:4], None, *runs[0][1][4:]], strict=False):
        assert kept is None or whole[: len(kept)] == kept


def test_no_more_requests_run_than_were_asked_for(path):
    options = EngineOptions(max_running=2, device="cpu")
    with closing(TokenCore(resolve(open_checkpoint(path), Layout(), options))) as core:
        for prompt in PROMPTS:
            core.add(array("i", prompt), SamplingParams(max_new_tokens=3, ignore_eos=True))
        most = 0
        while core.has_work:
            core.poll()
            most = max(most, len(core._loop.scheduler._running))
    assert most == 2


def test_what_cannot_run_is_refused_and_an_end_is_told_to_whoever_asks(core):
    with pytest.raises(UserError, match="stop token id"):
        core.add(array("i", PROMPTS[0]), SamplingParams(stop_token_ids=(10**6,)))
    with pytest.raises(UserError, match="outside the model's vocabulary"):
        core.add([5, 10**6], SamplingParams())
    with pytest.raises(UserError, match="sampling is None: give SamplingParams"):
        core.add([5], None)
    with pytest.raises(UserError, match="the prompt is empty"):
        core.add(array("i"), SamplingParams())
    core.add(array("i", PROMPTS[0]), SamplingParams(max_new_tokens=40))
    os.kill(core.process_ids[1], signal.SIGKILL)
    with pytest.raises(EngineError, match=r"rank 1 .* was ended by SIGKILL"):
        drain(core)
    for ask in (core.poll, lambda: core.add(array("i", [1]), SamplingParams())):
        with pytest.raises(EngineError, match=r"the engine has ended: rank 1 .* was ended by SIGKILL: make a new"):
            ask()
