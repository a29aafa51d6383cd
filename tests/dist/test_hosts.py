"""Engines over several hosts, which are network namespaces: their tokens, and what they say to mistakes of users."""

import contextlib
import json
import os
import socket
import subprocess
import time
from pathlib import Path

import pytest
from host_cases import SECRET, case, expected, start
from networks import Network

from tiers import few

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("all_cores")]

TIMEOUT_S = 240
ODD_HOST = {"PYTHONPATH": str(Path(__file__).with_name("odd_host"))}


def run(network, nnodes, cases):
    """Run the cases on all hosts. Returns what host 0 has printed for each of them."""
    started = [start(network, node, cases) for node in range(nnodes)]
    outputs = [process.communicate(timeout=TIMEOUT_S) for process in started]
    assert [process.returncode for process in started] == [0] * nnodes, outputs
    return [json.loads(line) for line in outputs[0][0].splitlines()]


def test_two_hosts_have_the_tokens_of_one_rank(oracles):
    """KVP across hosts, KVP x TPA, uneven hosts, and stages across hosts. Each host gets each message once."""
    oracle = oracles("llama", 5, 7, 30)
    with Network(2) as network:
        cases = [
            case(oracle, network, 2, {"kvp": 2, "tpa": 2}),
            case(oracle, network, 2, {"kvp": 3}, rank_mapping="0,2;1"),
            case(oracle, network, 2, {"kvp": 2, "tpa": 2}, rank_mapping="0-2;3"),
            case(oracle, network, 2, {"pp": 2}),
        ]
        for found in run(network, 2, cases):
            assert found["tokens"] == expected(oracle)
            assert_one_message_per_step(found, 2)


def assert_one_message_per_step(found, nnodes):
    """At most, however many ranks a host runs. KVP ranks with clocks of their own take only some steps."""
    others = 3  # Start, and what the pool asks beside steps
    for node in range(1, nnodes):
        assert 0 < found["sent"][str(node)] <= found["steps"] + others


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mixtral", "deepseek_v3"])
def test_three_hosts_have_the_tokens_of_one_rank(oracles, model):
    oracle = oracles(model, 5, 7, 30)
    tied = {"kvp": 3, "tpa": 1, "tpf": 1, "ffn_replicas": 3}
    with Network(3) as network:
        cases = [
            case(oracle, network, 3, {"kvp": 3, "tpa": 2}, rank_mapping="0,1,2;3;4,5"),
            case(oracle, network, 3, tied, placement="growing", growth_limit_tokens=8),
            case(oracle, network, 3, {"kvp": 3, "ep": 3}, chunk_tokens=7),
        ]
        for found in run(network, 3, cases):
            assert found["tokens"] == expected(oracle)
            assert_one_message_per_step(found, 3)


@pytest.mark.slow
def test_four_hosts_have_the_tokens_of_one_rank(oracles):
    oracle = oracles("llama", 5, 7, 30)
    with Network(4) as network:
        cases = [
            case(oracle, network, 4, {"kvp": 2, "tpa": 2}),
            case(oracle, network, 4, {"kvp": 2, "pp": 2}, prefix_cache=False),
        ]
        for found in run(network, 4, cases):
            assert found["tokens"] == expected(oracle)
            assert_one_message_per_step(found, 4)


# What is wrong on host 1, and what both say; None if host 0 keeps waiting for a host that fits.
MISTAKES = {
    "key": ({"LONGHELIX_CLUSTER_SECRET": "another secret of a careless user"}, [], "refuses the connection", None),
    "settings": ({}, ["--kv-dtype", "int8"], "host 1 (10.77.0.2) was started with other settings (kv_dtype=int8", 2),
    "layout": ({}, ["--ep", "1", "--tpf", "1", "--tied"], "host 1 (10.77.0.2) was started with another layout", 2),
    "number": ({}, ["--nnodes", "3", "--kvp", "3"], "host 1 (10.77.0.2) was started with another --nnodes", 2),
    "interface": ({}, ["--interface", "eth5"], "this host has no interface 'eth5'", None),
    "version": (
        ODD_HOST | {"ODD_VERSION": "0.1"},
        [],
        "host 1 (10.77.0.2) has other versions (longhelix 0.1, torch",
        2,
    ),
    "clock": (ODD_HOST | {"ODD_CLOCK_S": "90"}, [], "the clock of host 1 (10.77.0.2) is +", 2),
}


def command(network, node, *more, nnodes=2):
    options = ["--kvp", "2", "--nnodes", str(nnodes), "--node-rank", str(node), "--master-addr", network.address(0)]
    own = {more[place] for place in range(0, len(more), 2)}
    options = [each for place in range(0, len(options), 2) if options[place] not in own
               for each in options[place : place + 2]]  # fmt: skip
    return ["-m", "longhelix", "generate", "builtin", "--prompt", "a", "--max-model-len", "64", *options, *more]


def say(network, node, arguments, **variables):
    environment = os.environ | SECRET | variables
    return network.start(node, arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(process, timeout_s=60):
    """Its exit status, and its last line of standard error."""
    _, err = process.communicate(timeout=timeout_s)
    return process.returncode, err.splitlines()[-1]


@pytest.mark.parametrize("mistake", few(MISTAKES, 2))
def test_mistakes_get_one_sentence_on_each_host(mistake):
    variables, options, words, status = MISTAKES[mistake]
    with Network(2) as network:
        first = say(network, 0, command(network, 0))
        wrong = say(network, 1, command(network, 1, *options), **variables)
        code, line = ended(wrong)
        assert code == 2
        assert line.startswith("error: ")
        assert words in line
        if status is None:
            assert first.poll() is None
        else:
            assert ended(first) == (status, line)


@pytest.mark.slow
def test_a_node_rank_is_given_once():
    with Network(3) as network:
        say(network, 0, command(network, 0, "--kvp", "3", nnodes=3))
        kept = say(network, 1, command(network, 1, "--kvp", "3", nnodes=3))
        time.sleep(12)
        second = say(network, 2, command(network, 1, "--kvp", "3", nnodes=3))
        code, line = ended(second)
        assert code == 2
        assert "node rank 1 is already taken by host 1 (10.77.0.2), so 10.77.0.3 cannot have it too" in line
        assert kept.poll() is None


def test_a_taken_port_is_said():
    with Network(2) as network:
        taken = network.inside(0, socket.create_server, (network.address(0), 29501))
        with contextlib.closing(taken):
            code, line = ended(say(network, 0, command(network, 0)))
    assert (code, "port 29501 of 10.77.0.1 is already in use: set --master-port" in line) == (2, True)
