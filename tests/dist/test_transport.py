"""The sockets between engine and workers: every message, small and large, and ends that are gone, full or closed."""

import time
from unittest.mock import Mock

import msgspec
import pytest

from builtin import builtin
from longhelix.compute.runner.execution import Execution, RankCapabilities
from longhelix.compute.runner.progress import Progress
from longhelix.compute.runner.trace import TraceEvent
from longhelix.engine.options import EngineOptions
from longhelix.engine.resolution import resolve
from longhelix.engine.workers.transport import (
    Alive,
    CountRows,
    Done,
    EngineSocket,
    Execute,
    Failed,
    Joined,
    Loaded,
    Ready,
    RowCounts,
    Start,
    Stop,
    Traced,
    Warmed,
    WorkerSocket,
)
from longhelix.errors import UserError
from longhelix.scheduler.step import SequenceChanges, Step, StepMeasurements, StepResult
from longhelix.spec.layout import Layout

pytestmark = pytest.mark.dist

CAPABILITIES = RankCapabilities("cpu", native=True, overlaps=True, sums_in_rank_order=False, packed=False)
FROM_WORKERS = [
    Joined(),
    Alive(Progress(3, 5, "all-reduce 5", 2)),
    Loaded(2**40),
    Warmed(0.25),
    Ready(Execution.resolve(compile=False, replay=True, whole_batches=False, capabilities=CAPABILITIES)),
    Done(StepResult(7, (), 1, measured=StepMeasurements(fingerprint=2**64 - 1))),
    Traced([TraceEvent("attention", "compute", 1.5, 2.5, {"layer": 3})]),
    RowCounts([[1, 2], []]),
    Failed("it broke: \u00e9", lost_peer=True, user_error_code="out_of_memory"),
]


def test_no_socket_makes_a_decoder(tmp_path, monkeypatch):
    """Two threads of a rank have a socket each, and msgspec does not survive two that make decoders at once."""
    monkeypatch.setattr(msgspec.msgpack, "Decoder", Mock(side_effect=AssertionError))
    EngineSocket(tmp_path).close()
    WorkerSocket(tmp_path, 0).close()


def step_that_ends(count):
    """A step whose message has five bytes for each of `count` sequences, roughly."""
    return Step(7, changes=SequenceChanges(ended=tuple(range(2**16, 2**16 + count))))


@pytest.fixture
def engine(tmp_path):
    socket = EngineSocket(tmp_path)
    yield socket
    socket.close()


@pytest.fixture
def worker(engine, tmp_path):
    """Rank 2's, which the engine knows already."""
    socket = WorkerSocket(tmp_path, 2)
    socket.send(Joined())
    assert engine.receive(10) == (2, Joined())
    yield socket
    socket.close()


@pytest.mark.parametrize("message", FROM_WORKERS, ids=lambda message: type(message).__name__)
def test_what_a_worker_says_arrives_with_its_rank(engine, worker, message):
    worker.send(message)
    assert engine.receive(10) == (2, message)


def test_what_the_engine_says_arrives(engine, worker):
    config = resolve(builtin(), Layout(), EngineOptions(kv_cache_tokens=1024, device="cpu"))
    for message in (Start(config), Execute(step_that_ends(3)), CountRows(), Stop()):
        engine.send(range(2, 3), message)
        assert worker.receive() == message


@pytest.mark.parametrize("size", [0, 1, 2**14, 2**20])
def test_messages_of_any_size_arrive_whole_and_in_order(engine, worker, size):
    step = step_that_ends(size)
    engine.send(range(2, 3), Execute(step))
    engine.send(range(2, 3), Stop())
    assert (worker.receive(), worker.receive()) == (Execute(step), Stop())
    worker.send(Failed("x" * size, lost_peer=False, user_error_code=""))
    worker.send(Joined())
    assert engine.receive(10)[1].cause == "x" * size
    assert engine.receive(10) == (2, Joined())


def test_a_message_goes_to_all_ranks_it_is_for_and_to_no_other(engine, tmp_path):
    workers = [WorkerSocket(tmp_path, rank) for rank in range(3)]
    for socket in workers:
        socket.send(Joined())
    assert sorted(engine.receive(10)[0] for _ in workers) == [0, 1, 2]
    engine.send(range(2), CountRows())
    engine.send(range(3), Stop())
    assert [socket.receive() for socket in workers] == [CountRows(), CountRows(), Stop()]
    for socket in workers:
        socket.close()


def test_a_rank_that_is_not_there_keeps_nobody_waiting(engine, worker):
    began_s = time.monotonic()
    engine.send(range(5), Stop())  # of these there is only rank 2
    assert worker.receive() == Stop()
    assert engine.receive(0.05) is None
    assert time.monotonic() - began_s < 60


def test_signs_of_life_come_from_a_socket_of_their_own_to_which_nothing_is_sent(engine, worker, tmp_path):
    heart = WorkerSocket(tmp_path, 2, role="heartbeat")
    heart.offer(Alive(Progress(1)))
    assert engine.receive(10) == (2, Alive(Progress(1)))
    engine.send(range(2, 3), Stop())
    assert worker.receive() == Stop()
    heart.close()


def test_what_a_worker_said_last_arrives_although_it_has_closed(engine, tmp_path):
    socket = WorkerSocket(tmp_path, 0)
    socket.send(Failed("out of memory", lost_peer=False, user_error_code=""))
    socket.close()
    assert engine.receive(10) == (0, Failed("out of memory", lost_peer=False, user_error_code=""))


def test_closing_waits_for_nobody(tmp_path):
    engine, worker = EngineSocket(tmp_path), WorkerSocket(tmp_path, 0)
    worker.send(Joined())
    assert engine.receive(10) == (0, Joined())
    for _ in range(100):
        engine.send(range(1), Execute(step_that_ends(2**16)))  # which nobody reads
    began_s = time.monotonic()
    engine.close()
    engine.close()
    worker.offer(Joined())
    worker.close()  # within the second that it gives to what was sent
    assert time.monotonic() - began_s < 60


def test_a_directory_that_is_too_deep_for_a_socket_is_refused_in_words(tmp_path):
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    with pytest.raises(UserError, match=r"too long for a socket .*: set TMPDIR to a shorter one"):
        EngineSocket(deep)
