"""Faults of ranks under a server: every client gets one end, no token comes twice or not at all, and it serves again.

`pytest tests/dist/test_faults.py -rP` prints the rows of the table in docs/internals/reliability.md.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from served import served

from longhelix import LLM, Layout, SamplingParams
from longhelix.engine.workers import pool
from longhelix.serve.engine_thread import Recovery
from oracle import FAMILIES, NATIVE_SIZES, make_oracle, save_tokenizer_files

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("all_cores"), pytest.mark.timeout(600)]

RANKS = {"first": 0, "middle": 1, "last": 2}
# Prompts of one chunk and of many, and answers that outlast the fault.
PROMPTS = [[5, 7, 11, 13] * 9, [3], [8, 9] * 200, list(range(2, 60)) * 3]
NEW_TOKENS = 120
SETTINGS = {
    "layout": Layout(kvp=3),
    "chunk_tokens": 64,
    "device": "cpu",
    "execution": "eager",  # tapes would pass by the points of a step
    "kv_cache_tokens": 6144,
    "max_model_len": 1024,
}
BACK_S = 60


class Client(threading.Thread):
    """One stream: what comes, and how it ends."""

    def __init__(self, url, prompt):
        super().__init__()
        self.url, self.body = url, {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        self.words, self.ends, self.errors, self.done = [], [], [], 0
        self.begun = threading.Event()
        self.start()

    def run(self):
        import httpx

        with httpx.Client(base_url=self.url, timeout=120) as client:
            while not self._ask(client):
                time.sleep(0.1)

    def _ask(self, client):
        """Returns False where the engine starts again just now: the fault was quicker than this client."""
        with client.stream("POST", "/v1/completions", json=self.body | {"stream": True}) as got:
            if got.status_code == 503:
                return False
            assert got.status_code == 200
            for line in got.iter_lines():
                if line == "data: [DONE]":
                    self.done += 1
                elif line.startswith("data: "):
                    self._take(json.loads(line[6:]))
        return True

    def _take(self, event):
        if "error" in event:
            self.errors.append(event["error"]["message"])
            return
        [choice] = event["choices"]
        self.words += choice["text"].split()
        if choice["finish_reason"] is not None:
            self.ends.append(choice["finish_reason"])
        self.begun.set()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    oracle = make_oracle(FAMILIES["llama"], tmp_path_factory.mktemp("llama"))
    save_tokenizer_files(oracle.path)
    return str(oracle.path)


@pytest.fixture(scope="module")
def expected(path):
    with LLM(path, **SETTINGS) as llm:
        sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
        return [result.text.split() for result in llm.generate(PROMPTS, sampling)]


@pytest.fixture(scope="module")
def fault_file(tmp_path_factory):
    return tmp_path_factory.mktemp("faults") / "fault"


@pytest.fixture(scope="module")
def server(path, fault_file):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent / "failpoints"))
        patch.setenv("FAULT_FILE", str(fault_file))
        patch.setattr(pool, "SILENCE_S", 3.0)
        recovery = Recovery(restarts=10**6)
        with served(model=path, recovery=recovery, **SETTINGS) as (client, llm):
            yield client, llm


def health(client):
    return client.get("/health").json()


def await_health(client, seen):
    """Until it is as wanted."""
    deadline_s = time.monotonic() + BACK_S
    while not seen(found := health(client)):
        assert time.monotonic() < deadline_s, found
        time.sleep(0.05)
    return found


def arm(fault_file, rank, point, action, row=None):
    new = fault_file.with_suffix(".new")
    new.write_text(json.dumps({"rank": rank, "point": point, "action": action, "row": row}))
    new.rename(fault_file)


def blocks_held(client, llm):
    """After the last requests have gone from the engine."""
    await_health(client, lambda found: found["running"] == found["waiting"] == 0)
    deadline_s = time.monotonic() + BACK_S
    while any(rank.held for rank in llm.observe().ranks) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return [rank.held for rank in llm.observe().ranks]


QUICK = {("kill", "middle", "decode"), ("raise", "last", "prefill"), ("NaN", "first", "exchange")}
CASES = [
    pytest.param(action, rank, point, marks=() if (action, rank, point) in QUICK else pytest.mark.slow)
    for action in ("kill", "stop", "raise", "NaN", "out of memory", "slow")
    for rank in RANKS
    for point in ("prefill", "decode", "exchange")
]


@pytest.mark.parametrize(("action", "rank", "point"), CASES)
def test_a_fault_in_a_step(server, fault_file, expected, action, rank, point):
    client, llm = server
    before, url = health(client), str(client.base_url)
    if point == "prefill":
        arm(fault_file, RANKS[rank], point, action)
    clients = [Client(url, prompt) for prompt in PROMPTS]
    if point != "prefill":
        for one in clients:
            assert one.begun.wait(BACK_S)
        arm(fault_file, RANKS[rank], point, action)
    begun_s = time.monotonic()
    restarted = action in ("kill", "stop", "raise", "out of memory")
    if restarted:
        await_health(client, lambda found: found["restarts"] > before["restarts"])
        noticed_s = time.monotonic() - begun_s
        await_health(client, lambda found: found["status"] == "ok")
        back_s = time.monotonic() - begun_s
    for one in clients:
        one.join(BACK_S)
        assert one.done == 1
        assert len(one.ends) + len(one.errors) == 1, (one.ends, one.errors)
    assert not fault_file.exists()
    whole = [one.words == words and one.ends == ["length"] for one, words in zip(clients, expected, strict=True)]
    failed = sum(bool(one.errors) for one in clients)
    if action == "NaN":
        # Those that had a row in the step, each for itself.
        assert 1 <= failed <= len(clients)
        assert all(good or one.errors for good, one in zip(whole, clients, strict=True))
    else:
        assert all(whole)
    assert health(client)["restarts"] - before["restarts"] == restarted
    assert blocks_held(client, llm) == [0, 0, 0]
    assert Client(url, PROMPTS[0]).begun.wait(BACK_S)
    seen = f"detected after {noticed_s:.1f} s, ready after {back_s:.1f} s" if restarted else "no restart"
    streams = f"{sum(whole)} of {len(clients)} complete" + (f", {failed} with an error" if failed else "")
    print(f"| {action} | {rank} | {point} | {seen} | {streams} |")


@pytest.mark.parametrize(
    ("action", "rank"),
    [
        pytest.param(action, rank, marks=() if (action, rank) == ("kill", "last") else pytest.mark.slow)
        for action in ("kill", "stop")
        for rank in RANKS
    ],
)
def test_a_fault_while_there_is_nothing_to_do(server, expected, action, rank):
    client, llm = server
    blocks_held(client, llm)
    before, begun_s = health(client), time.monotonic()
    os.kill(llm.process_ids[RANKS[rank]], signal.SIGKILL if action == "kill" else signal.SIGSTOP)
    await_health(client, lambda found: found["restarts"] > before["restarts"])
    noticed_s = time.monotonic() - begun_s
    await_health(client, lambda found: found["status"] == "ok")
    back_s = time.monotonic() - begun_s
    one = Client(str(client.base_url), PROMPTS[0])
    one.join(BACK_S)
    assert (one.words, one.ends, one.errors, one.done) == (expected[0], ["length"], [], 1)
    print(f"| {action} | {rank} | idle | detected after {noticed_s:.1f} s, ready after {back_s:.1f} s | - |")


def test_who_comes_while_it_starts_again_is_told_to_come_later(server, fault_file, expected):
    client, _ = server
    arm(fault_file, 1, "decode", "kill")
    one = Client(str(client.base_url), PROMPTS[0])
    await_health(client, lambda found: found["status"] == "restarting")
    answer = client.post("/v1/completions", json={"prompt": [5], "max_tokens": 2})
    if answer.status_code != 200:  # it is quick
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "restarting"
        assert answer.headers["retry-after"]
    one.join(BACK_S)
    assert (one.words, one.ends) == (expected[0], ["length"])


@pytest.fixture(scope="module")
def native_path(tmp_path_factory):
    """Of a model whose kernels do not depend on the batch."""
    oracle = make_oracle(NATIVE_SIZES, tmp_path_factory.mktemp("native"))
    save_tokenizer_files(oracle.path)
    return str(oracle.path)


@pytest.mark.parametrize(
    "point", ["decode", *(pytest.param(point, marks=pytest.mark.slow) for point in ("prefill", "exchange"))]
)
def test_a_poisoned_request_fails_alone_and_leaves_the_bits_of_others(native_path, tmp_path, monkeypatch, point):
    fault_file = tmp_path / "fault"
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent / "failpoints"))
    monkeypatch.setenv("FAULT_FILE", str(fault_file))
    sampling = SamplingParams(max_new_tokens=24, ignore_eos=True, logprobs=4)
    prompts = [[2 + index] * (1 + 3 * index) for index in range(16)]

    def run(llm, with_fault):
        ids = [llm.add(prompt, sampling) for prompt in prompts]
        results = {}
        if with_fault and point == "prefill":
            arm(fault_file, 1, point, "NaN", row=0)
        while len(results) < len(ids):
            deltas = llm.step()
            results |= {delta.request_id: delta.result for delta in deltas if delta.result is not None}
            if with_fault and point != "prefill" and len(deltas) == len(ids):  # all decode
                arm(fault_file, 1, point, "NaN", row=5)
                with_fault = False
        return [results[id] for id in ids]

    settings = SETTINGS | {"batch_invariant": True}
    with LLM(native_path, **settings) as llm:
        expected, seen = run(llm, False), run(llm, True)
        assert not fault_file.exists()
        assert run(llm, False) is not None
        assert [rank.held for rank in llm.observe().ranks] == [0, 0, 0]
    failed = [index for index, result in enumerate(seen) if result.finish_reason == "error"]
    assert len(failed) == 1
    assert "logit" in seen[failed[0]].error
    for index in set(range(16)) - set(failed):
        assert seen[index].token_ids == expected[index].token_ids
        assert seen[index].logprobs == expected[index].logprobs
