"""The same collectives, the same cases, over gloo and over shared memory."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

RANK_PROGRAM = Path(__file__).with_name("collectives_rank.py")
TIMEOUT_S = 90

pytestmark = pytest.mark.dist
needs_native = pytest.mark.skipif(
    importlib.util.find_spec("longhelix._native") is None, reason="the native module is not built here"
)
backends = pytest.mark.parametrize("backend", ["gloo", pytest.param("shm", marks=needs_native)])


def run(tmp_path, case, backend, size):
    rendezvous = tmp_path / "rendezvous"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK_PROGRAM), case, backend, str(rank), str(size), str(rendezvous)],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(size)
    ]
    try:
        errors = [rank.communicate(timeout=TIMEOUT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, error in zip(ranks, errors, strict=True):
        assert rank.returncode == 0, error


@backends
@pytest.mark.parametrize("size", [2, 3])
def test_values(tmp_path, backend, size):
    run(tmp_path, "sums,pieces,gathers,mixture", backend, size)


@needs_native
def test_four_ranks_choose_shared_memory_by_themselves(tmp_path):
    run(tmp_path, "sums,pieces,gathers,mixture", "auto", 4)


@backends
def test_functional_collectives(tmp_path, backend):
    run(tmp_path, "functional_forms", backend, 2)


@backends
@pytest.mark.parametrize("size", [2, 3])
def test_dead_peer_is_an_error_within_seconds(tmp_path, backend, size):
    before = set(Path("/dev/shm").iterdir())
    run(tmp_path, "death", backend, size)
    # Other programs of this host may make files of theirs meanwhile.
    assert not [left for left in set(Path("/dev/shm").iterdir()) - before if "longhelix" in left.name]


@backends
def test_dead_peer_is_told_from_other_errors_in_a_graph(tmp_path, backend):
    run(tmp_path, "death_in_a_graph", backend, 2)


@needs_native
def test_waiting_does_not_burn_a_core(tmp_path):
    run(tmp_path, "idle", "shm", 2)


@needs_native
def test_what_the_backend_does_not_do_is_refused_in_words(tmp_path):
    run(tmp_path, "refusals", "shm", 2)
