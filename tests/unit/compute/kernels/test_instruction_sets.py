"""What other processors run: the kernels of each instruction set that this one has, where they are asked for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from longhelix.compute.kernels import native

pytestmark = [
    pytest.mark.unit,
    pytest.mark.skipif(native.module is None, reason="the native kernels were not built"),
]

NAME = "LONGHELIX_INSTRUCTION_SET"
TESTS = Path(__file__).parents[1]


def run(instruction_set: str, *arguments: str, timeout_s: float) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment | {NAME: instruction_set},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@pytest.mark.slow
def test_the_set_that_is_asked_for_runs_and_an_unknown_one_is_refused():
    say = "from longhelix.compute.kernels import native; print(native.module.instruction_set())"
    assert run("portable", "-c", say, timeout_s=60).stdout == "portable\n"
    refused = run("sse9", "-c", say, timeout_s=60)
    assert f"ValueError: {NAME} is sse9: this processor has portable" in refused.stderr


@pytest.mark.slow  # minutes: the portable kernels are
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("instruction_set", ["portable", "avx2"])
def test_the_tests_of_kernels_pass_on(instruction_set):
    if instruction_set == "avx2" and native.module.instruction_set() != "avx512":
        pytest.skip("this processor has no wider set: all tests run on avx2, or it has none")
    paths = [str(TESTS / path) for path in ("kernels", "runner", "models/test_gguf_packing.py")]
    ran = run(instruction_set, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *paths, timeout_s=3500)
    assert ran.returncode == 0, ran.stdout[-3000:]
