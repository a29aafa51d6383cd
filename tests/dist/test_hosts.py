"""Engines over several hosts, which are network namespaces: their tokens, and what happens when something is wrong."""

import json
import subprocess
from pathlib import Path

import pytest
from networks import Network

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("all_cores")]

PROGRAM = str(Path(__file__).with_name("hosts_program.py"))
TIMEOUT_S = 240
NEW_TOKENS = 8
SECRET = {"LONGHELIX_CLUSTER_SECRET": "a secret for tests, and only for them"}


def settings(network, nnodes, **more):
    return {"nnodes": nnodes, "master_addr": network.address(0), "dtype": "float32", "block_tokens": 4} | more


def run(network, nnodes, cases, environment):
    """Run the cases on all hosts. Returns what host 0 printed for each of them."""
    started = [
        network.start(
            node,
            [PROGRAM, str(node), json.dumps(cases)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for node in range(nnodes)
    ]
    outputs = [process.communicate(timeout=TIMEOUT_S) for process in started]
    assert [process.returncode for process in started] == [0] * nnodes, outputs
    return [json.loads(line) for line in outputs[0][0].splitlines()]


def case(oracle, network, nnodes, layout, **more):
    prompts = [list(map(int, prompt)) for prompt in oracle.prompts]
    sampling = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return {
        "model": str(oracle.path),
        "layout": layout,
        "settings": settings(network, nnodes, **more),
        "prompts": prompts,
        "sampling": sampling,
    }


@pytest.fixture
def environment(monkeypatch):
    import os

    return os.environ | SECRET


def expected(oracle):
    return [list(tokens)[:NEW_TOKENS] for tokens in oracle.tokens]


def test_two_hosts_have_the_tokens_of_one_rank(oracles, environment):
    """KVP across hosts, TPA across hosts, uneven hosts and stages."""
    oracle = oracles("llama", 5, 7, 30)
    with Network(2) as network:
        cases = [
            case(oracle, network, 2, {"kvp": 2, "tpa": 2}),
            case(oracle, network, 2, {"kvp": 3}, rank_mapping="0,1;2"),
            case(oracle, network, 2, {"pp": 2}),
        ]
        for found in run(network, 2, cases, environment):
            assert found["tokens"] == expected(oracle)
