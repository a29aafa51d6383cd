"""The heart of a worker while the engine is idle, and so reads nothing."""

import subprocess
import sys
import time

import psutil
import pytest

from longhelix.compute.runner.progress import Progress
from longhelix.engine.workers.transport import Alive, EngineSocket, WorkerSocket

pytestmark = pytest.mark.dist

CHILD = """
import os, sys, time
from pathlib import Path
from longhelix.engine.workers import started_rank, worker
directory = Path(sys.argv[1])
started_rank.end_with_parent(os.getppid(), directory)
worker.HEARTBEAT_S = 0
worker._Heart(directory, 0)
time.sleep(600)
"""

PARENT = """
import subprocess, sys, time
from pathlib import Path
from longhelix.engine.workers.transport import EngineSocket
directory = Path(sys.argv[1])
socket = EngineSocket(directory)
child = subprocess.Popen([sys.executable, "-c", sys.argv[2], str(directory)])
socket.receive(60)
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def directory(tmp_path):
    made = tmp_path / "sockets"
    made.mkdir()
    return made


@pytest.mark.slow
def test_a_worker_whose_beats_nobody_reads_ends_with_its_parent(directory):
    """More beats than queues hold."""
    command = [sys.executable, "-c", PARENT, str(directory), CHILD]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        time.sleep(3)
        parent.kill()
    try:
        child.wait(timeout=60)
    finally:
        if child.is_running():
            child.kill()
    assert not directory.exists()


def test_beats_are_dropped_while_nobody_reads_and_arrive_again_after(directory):
    engine, heart = EngineSocket(directory), WorkerSocket(directory, 3, role="heartbeat")
    for beat in range(20_000):
        heart.offer(Alive(Progress(beat)))
    new, received, deadline_s = Alive(Progress(20_000)), [], time.monotonic() + 60
    while (3, new) not in received and time.monotonic() < deadline_s:
        heart.offer(new)  # is dropped, too, until there is room
        received.append(engine.receive(0.1))
    assert received[-1] == (3, new)
    assert (3, Alive(Progress(0))) in received
    assert len(received) < 1000
    heart.close()
    engine.close()
