"""The passes on real ranks over gloo: graphs of torch.compile, of our modules and of transformers."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from world import run_ranks

TIMEOUT_S = 1800

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 60)]


@pytest.mark.parametrize("size", [2, 3])
def test_compiled_modules(size):
    run_ranks("passes_rank", ["modules,large"], size, TIMEOUT_S)


def test_static_scales_of_a_calibration():
    run_ranks("passes_rank", ["calibrated"], 2, TIMEOUT_S)


def test_cache_of_graphs():
    run_ranks("passes_rank", ["cache"], 2, TIMEOUT_S)


@pytest.mark.parametrize(
    "case", ["differ=more", "differ=all", "numbers", "options", "alone", "failed", "one_store", "half_cached", "noted"]
)
def test_ranks_tell_each_other_what_they_do(case):
    run_ranks("passes_rank", [case], 2, TIMEOUT_S)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_models_of_transformers(name):
    run_ranks("passes_rank", [f"others={name}"], 2, TIMEOUT_S)


def test_the_example():
    """Run the example as its first lines say."""
    program = Path(__file__).parents[2] / "examples" / "sequence_parallel.py"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = ["--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={port}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *place, str(program)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--tokens", "13", "--quantize", "int8"], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "{'LastAllReduceRMSNorm': 1, 'MiddleAllReduceRMSNormDynamicINT8': 7}" in done.stdout
    assert "left alone:  nothing" in done.stdout
