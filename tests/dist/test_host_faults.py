"""Faults of hosts, ranks and links under engines over several hosts, which are network namespaces.

Each fault is found within 10 s and named. When the host is back, running requests continue: no token is lost or
repeated. Nothing is left of the ranks that have failed.

`pytest tests/dist/test_host_faults.py -rP` prints the times in the table of docs/guides/several-hosts.md.
"""

import json
import os
import re
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import psutil
import pytest
from host_cases import SECRET, case, expected, go_on, line_with, start
from networks import Network, all_processes, program, ranks

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("all_cores")]

FOUND_S = GONE_S = 10
END_S = 60
NAME = r"host 1 \(10.77.0.2\)"


# What happens to a host. `started`: the process that `Network.start` has returned.


def kill_rank(network, node, started):
    ranks(started)[0].kill()


def kill_program(network, node, started):
    program(started).kill()


def stop_host(network, node, started):
    for process in all_processes(started):
        process.suspend()


def stop_ranks(network, node, started):
    for process in ranks(started):
        process.suspend()


def cut_link(network, node, started):
    network.cut(node)


# What brings it back.


def nothing(network, node, started, engine):
    return started


def wake(network, node, started, engine):
    for process in all_processes(started):
        with suppress(psutil.NoSuchProcess):
            process.resume()
    return started


def join(network, node, started, engine):
    network.join(node)
    return started


def start_again(network, node, started, engine):
    started.wait(GONE_S)  # until its ranks have ended too
    assert not list(network.temporary(node).iterdir())
    return start(network, node, [engine])


def kill_and_start_again(network, node, started, engine):
    kill_program(network, node, started)
    wake(network, node, started, engine)
    return start_again(network, node, started, engine)


# What happens to host 1, how host 0 names it, and what brings host 1 back.
FAULTS = {
    "kill -9 of a rank": (kill_rank, rf"was ended by SIGKILL on {NAME}", nothing),
    "kill -9 of the follower": (kill_program, rf"{NAME} is gone", start_again),
    "SIGSTOP of the host": (stop_host, rf"{NAME} (has not answered|is gone)", wake),
    "SIGSTOP of the host, then kill -9": (stop_host, rf"{NAME} (has not answered|is gone)", kill_and_start_again),
    "SIGSTOP of ranks": (stop_ranks, rf"{NAME} has not answered", nothing),
    "link cut": (cut_link, rf"{NAME} (has not answered|is gone)", join),
}
PHASES = ("idle", "prefill", "decode")
QUICK = {("kill -9 of a rank", "decode"), ("kill -9 of the follower", "idle")}
CASES = [
    *((fault, phase) for fault in FAULTS for phase in PHASES),
    *((fault, "unwatched") for fault in ("kill -9 of the follower", "SIGSTOP of the host")),
]


def paused(oracles, network, phase):
    """Start an engine on two hosts and await a phase. Returns what it is to compute, and the processes of the hosts."""
    oracle = oracles("llama", 5, 7, 30)
    engine = case(oracle, network, 2, {"kvp": 2}, chunk_tokens=4) | {"pause_in": phase}
    first, second = (start(network, node, [engine]) for node in range(2))
    found = line_with("paused", first)
    if phase == "prefill":
        assert (0 < found["prefilled"] < len(oracle.prompts[-1]), found["tokens"]) == (True, 0)
    if phase == "decode":
        assert 0 < found["tokens"] < len(oracle.tokens[-1])
    return oracle, engine, first, second


def assert_complete(oracle, network, first, second):
    """The engine computes the right tokens without another failure, and leaves nothing."""
    assert line_with("tokens", first)["tokens"] == expected(oracle)
    assert [each.wait(END_S) for each in (first, second)] == [0, 0]
    assert network.left_over() == []


@pytest.mark.parametrize(
    ("fault", "phase"), [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in CASES]
)
def test_a_host_that_fails_is_named_and_requests_continue_when_it_is_back(oracles, fault, phase):
    strike, words, bring_back = FAULTS[fault]
    with Network(2) as network:
        oracle, engine, first, second = paused(oracles, network, phase)
        before = [*ranks(first), *ranks(second)]
        assert len(before) == 2
        strike(network, 1, second)
        struck_s = time.monotonic()
        if phase != "idle":
            go_on(first)
        reason = line_with("failed", first)["failed"]
        found_s = time.monotonic() - struck_s
        assert found_s < FOUND_S
        assert re.search(words, reason), reason
        second = bring_back(network, 1, second, engine)
        if phase == "idle":
            go_on(first)
        assert_complete(oracle, network, first, second)
        assert not any(rank.is_running() for rank in before)
    print(f"| {fault} | {phase} | {found_s:.1f} s | {reason} |")


@pytest.mark.slow
def test_a_host_that_slept_until_its_connection_was_lost_joins_again(oracles):
    with Network(2) as network:
        oracle, engine, first, second = paused(oracles, network, "decode")
        stop_host(network, 1, second)
        go_on(first)
        line_with("failed", first)
        deadline_s = time.monotonic() + GONE_S
        while connections(network, 0):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        wake(network, 1, second, engine)
        assert_complete(oracle, network, first, second)
        assert "the connection to host 0 is lost: joining again" in second.stderr.read()


def connections(network, node):
    """The connections of followers that a host has."""
    return network.run(node, "ss", "-Htn", "state", "established", "sport", "=", ":29501").splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_a_slow_link_changes_only_times(oracles, phase):
    with Network(2) as network:
        oracle, _, first, second = paused(oracles, network, phase)
        network.slow(1)
        go_on(first)
        assert_complete(oracle, network, first, second)
        assert network.held_up(1)[0] > 0


@pytest.mark.slow
def test_one_percent_of_lost_packets_changes_only_times(oracles):
    oracle = oracles("llama", 5, 7, 30)
    with Network(2) as network:
        for node in range(2):
            network.lose(node)
        engine = case(oracle, network, 2, {"kvp": 2, "tpa": 2}, chunk_tokens=4)
        first, second = (start(network, node, [engine] * 3) for node in range(2))
        for _ in range(2):
            assert line_with("tokens", first)["tokens"] == expected(oracle)
        assert_complete(oracle, network, first, second)
        assert sum(network.held_up(node)[1] for node in range(2)) > 0


# What happens to host 0, and what makes it run again.
FAULTS_OF_HOST_0 = {
    "kill -9": (kill_program, start_again),
    "SIGSTOP, then kill -9": (stop_host, kill_and_start_again),
    "SIGSTOP, then SIGCONT": (stop_host, wake),
    "link cut": (cut_link, join),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS_OF_HOST_0)
def test_followers_end_their_ranks_when_host_0_fails_and_join_it_again(oracles, fault):
    strike, bring_back = FAULTS_OF_HOST_0[fault]
    with Network(2) as network:
        oracle, engine, first, second = paused(oracles, network, "decode")
        before = ranks(second)
        strike(network, 0, first)
        struck_s = time.monotonic()
        _, alive = psutil.wait_procs(before, GONE_S)
        assert alive == []
        gone_s = time.monotonic() - struck_s
        again = bring_back(network, 0, first, engine)
        if again is not first:
            line_with("paused", again)
        go_on(again)
        if again is first:
            assert re.search(NAME, line_with("failed", first)["failed"])
        assert_complete(oracle, network, again, second)
    print(f"| host 0: {fault} | ranks of host 1 have ended after {gone_s:.1f} s |")


URL = "http://127.0.0.1:8000"  # on host 0


def serve(network, node):
    options = ["--kvp", "2", "--nnodes", "2", "--node-rank", str(node), "--master-addr", network.address(0)]
    options += ["--max-model-len", "1024", "--kv-cache-tokens", "4096", "--port", "8000", "--log-format", "json"]
    return network.start(
        node, ["-m", "longhelix", "serve", "builtin", *options], env=os.environ | SECRET, stderr=subprocess.PIPE
    )


def await_ready(first):
    for line in first.stderr:
        if line.startswith("{") and json.loads(line)["event"] == "ready":
            return
    raise AssertionError("the server has ended")


def ask(begun):
    """Stream an answer. Returns its text, and why the stream ended; None if it is complete."""
    body = {"prompt": "A host", "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": True}
    text, done = "", False
    try:
        with httpx.stream("POST", f"{URL}/v1/completions", json=body, timeout=END_S) as got:
            for line in got.iter_lines():
                done = done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    begun.set()
    except httpx.TransportError as error:
        return text, type(error).__name__
    return text, None if done else "no [DONE]"


def is_ready():
    return httpx.get(f"{URL}/ready").status_code == 200


def refused():
    got = httpx.post(f"{URL}/v1/completions", json={"prompt": "A host", "max_tokens": 1})
    return got.status_code, got.json()["error"]["code"], "retry-after" in got.headers


@pytest.mark.slow
@pytest.mark.timeout(600)  # it starts six servers and followers
def test_clients_wait_for_a_host_that_fails_and_get_an_error_at_once_when_host_0_ends():
    with Network(2) as network, ThreadPoolExecutor() as pool:

        def stream():
            """Start a stream and await its first token."""
            begun = threading.Event()
            answer = pool.submit(network.inside, 0, ask, begun)
            assert begun.wait(END_S)
            return answer

        first, second = (serve(network, node) for node in range(2))
        await_ready(first)
        whole, ended = stream().result()
        assert ended is None

        answer = stream()
        kill_program(network, 1, second)
        struck_s = time.monotonic()
        while network.inside(0, is_ready):
            assert time.monotonic() - struck_s < FOUND_S
            time.sleep(0.05)
        assert network.inside(0, refused) == (503, "restarting", True)
        second.wait(GONE_S)
        second = serve(network, 1)
        assert answer.result() == (whole, None)

        answer = stream()
        kill_program(network, 0, first)
        struck_s = time.monotonic()
        text, ended = answer.result()
        assert time.monotonic() - struck_s < FOUND_S
        assert (whole.startswith(text), ended is None) == (True, False)
        first.wait(GONE_S)
        first = serve(network, 0)
        await_ready(first)
        assert stream().result() == (whole, None)
        program(first).terminate()
        assert [each.wait(END_S) for each in (first, second)] == [0, 0]
        assert network.left_over() == []
