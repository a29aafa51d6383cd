"""Engines that hosts_program.py runs on the hosts of a network, and what host 0 prints."""

import json
import os
import subprocess
from pathlib import Path

PROGRAM = str(Path(__file__).with_name("hosts_program.py"))
SECRET = {"LONGHELIX_CLUSTER_SECRET": "a secret for tests, and only for them"}


def case(oracle, network, nnodes, layout, **more):
    """One engine for all prompts of an oracle. `more`: settings of the engine."""
    settings = {"nnodes": nnodes, "master_addr": network.address(0), "dtype": "float32", "block_tokens": 4}
    return {
        "model": str(oracle.path),
        "layout": layout,
        "settings": settings | {"max_model_len": 64} | more,
        "prompts": [[int(token) for token in prompt] for prompt in oracle.prompts],
        "sampling": {"max_new_tokens": len(oracle.tokens[0]), "ignore_eos": True},
    }


def expected(oracle):
    """The tokens of a case."""
    return [[int(token) for token in tokens] for tokens in oracle.tokens]


def start(network, node, cases):
    """Start engines on a host, one after the other."""
    return network.start(
        node,
        [PROGRAM, str(node), json.dumps(cases)],
        env=os.environ | SECRET,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def line_with(key, first):
    """The next line of host 0, which must have this key."""
    line = first.stdout.readline()
    assert line, first.stderr.read()
    found = json.loads(line)
    assert key in found, found
    return found


def go_on(first):
    """Let host 0 go on after it has paused."""
    first.stdin.write("\n")
    first.stdin.flush()
