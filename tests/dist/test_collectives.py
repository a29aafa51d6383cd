"""The same collectives, the same cases, over gloo and over shared memory."""

import importlib.util
from pathlib import Path

import pytest
from world import run_ranks

from tiers import few

TIMEOUT_S = 240

pytestmark = [pytest.mark.dist, pytest.mark.usefixtures("all_cores")]
needs_native = pytest.mark.skipif(
    importlib.util.find_spec("longhelix._native") is None, reason="the native module is not built here"
)
backends = pytest.mark.parametrize(
    "backend", ["gloo", pytest.param("shm", marks=needs_native), pytest.param("hosts", marks=needs_native)]
)


def run(case, backend, size):
    run_ranks("collectives_rank", [case, backend], size, TIMEOUT_S)


@backends
@pytest.mark.parametrize(
    ("cases", "size"),
    few(
        [
            ("sums,pieces,gathers,shards,products,mixture,scattered_sums", 3),
            ("sums,pieces,gathers,shards,products,mixture,scattered_sums,functional_forms", 2),
        ]
    ),
    ids=["3", "2"],
)
def test_values(backend, cases, size):
    run(cases, backend, size)


@needs_native
@pytest.mark.parametrize("size", [3, pytest.param(5, marks=pytest.mark.slow)])
def test_bytes_between_hosts_are_counted(size):
    run("links", "hosts", size)


@needs_native
@pytest.mark.slow
def test_four_ranks_choose_shared_memory_by_themselves():
    run("sums,pieces,gathers,mixture", "auto", 4)


@backends
@pytest.mark.parametrize("size", [2, 3])
def test_dead_peer_is_an_error_within_seconds(backend, size):
    before = set(Path("/dev/shm").iterdir())
    run("death", backend, size)
    # Other programs of this host may make files of theirs meanwhile.
    assert not [left for left in set(Path("/dev/shm").iterdir()) - before if "longhelix" in left.name]


@backends
def test_dead_peer_is_told_from_other_errors_in_a_graph(backend):
    run("death_in_a_graph", backend, 2)


@needs_native
def test_waiting_does_not_burn_a_core_and_what_the_backend_does_not_do_is_refused_in_words():
    run("idle,refusals", "shm", 2)
