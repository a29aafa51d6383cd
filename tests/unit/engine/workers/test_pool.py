"""Starts that fail before a rank is there, and what the engine makes of its ranks' answers."""

import errno
import tempfile
from unittest.mock import Mock

import pytest
import zmq
from zmq import Context

from longhelix.engine.workers.pool import WorkerPool, _check_same_collectives, _first_done, _InFlight
from longhelix.errors import EngineError, UserError
from longhelix.scheduler.step import StepMeasurements, StepResult
from longhelix.spec.hosts import Hosts
from longhelix.spec.layout import Layout

pytestmark = pytest.mark.unit


@pytest.fixture
def contexts(monkeypatch):
    """Those of zmq that are made."""
    made = []
    monkeypatch.setattr(zmq, "Context", lambda: made.append(Context()) or made[-1])
    return made


def start():
    return WorkerPool(Mock(layout=Layout()), Mock(), Mock(), Mock())


@pytest.mark.parametrize("by_torchrun", [False, True])
def test_a_temporary_directory_too_deep_for_a_socket_is_refused_and_nothing_stays(
    contexts, tmp_path, monkeypatch, by_torchrun
):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    if by_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(UserError, match=r"path is too long for a socket .*: set TMPDIR to a shorter one"):
        start()
    assert not list(deep.iterdir())
    assert [context.closed for context in contexts] == [True]


def test_a_socket_that_cannot_be_had_leaves_nothing(contexts, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Context, "socket", Mock(side_effect=zmq.ZMQError(errno.EMFILE)))
    with pytest.raises(EngineError, match=r"the engine's socket .* cannot be opened: Too many open files"):
        start()
    assert not list(tmp_path.iterdir())
    assert [context.closed for context in contexts] == [True]


def results(*fingerprints):
    return [StepResult(7, (), 1, measured=StepMeasurements(fingerprint=number)) for number in fingerprints]


def test_ranks_that_ran_other_collectives_are_named():
    _check_same_collectives(results(5, 5, 5), range(3))
    with pytest.raises(EngineError, match=r"in step 7 ranks \[5, 7\] ran different collectives from rank 4"):
        _check_same_collectives(results(5, 6, 5, 0), range(4, 8))


def in_flight(ranks, done):
    return _InFlight([[tuple(ranks)]], dict.fromkeys(done, results(5)[0]))


def test_results_of_a_rank_come_in_the_order_of_its_steps():
    """Ranks 0 and 1 were one team in step 7, and are none in those after it."""
    steps = {7: in_flight([0, 1], [0]), 8: in_flight([0], [0]), 9: in_flight([2], [2]), 10: in_flight([1], [])}
    assert _first_done(steps) == 9
    del steps[9]
    assert _first_done(steps) is None
    steps[7].results[1] = results(5)[0]
    assert _first_done(steps) == 7
    del steps[7]
    assert _first_done(steps) == 8


def test_a_host_that_is_gone_is_named_rather_than_the_step_that_waits_for_it():
    pool = WorkerPool.__new__(WorkerPool)
    pool._in_flight = {7: in_flight([0, 1], [])}
    pool._watchdog, pool._processes, pool._cluster = Mock(), Mock(statuses=dict), Mock()
    pool._watchdog.check.side_effect = EngineError("rank 0 is stuck in step 7")
    pool._cluster.describe = "host {} (10.0.0.2)".format
    pool._hosts = Hosts.in_order([1, 1])
    pool._ranks, pool._consequences, pool._patience_s = range(2), {}, dict.fromkeys(range(2), 5.0)
    pool._quiet_s = {0: 0.5, 1: 4.9}
    with pytest.raises(EngineError, match="rank 0 is stuck in step 7"):
        pool._check_progress()
    pool._quiet_s[1] = 5.1
    with pytest.raises(EngineError, match=r"^host 1 \(10.0.0.2\) has not answered for 5 s"):
        pool._check_progress()
