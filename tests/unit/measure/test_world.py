"""Ranks that measure something: whoever takes too long, dies or is left alone."""

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from longhelix.compute.kernels import native
from longhelix.errors import EngineError
from longhelix.measure.collectives import CollectivesJob
from longhelix.measure.world import World

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(native.module is None, reason="this measures the native kernels, which are not built here"),
]

ENDLESS = CollectivesJob(ranks=2, bytes=(2048,), repeats=10**9)


def test_ranks_that_take_too_long_are_ended():
    with World(ENDLESS, 2, timeout_s=1) as ranks, pytest.raises(EngineError, match="longer than 1 s"):
        next(ranks.points())
    assert not any(psutil.pid_exists(pid) for pid in ranks.process_ids.values())


@pytest.mark.parametrize("after_s", [0.1, 8], ids=["before it meets the others", "among them"])
def test_a_rank_that_is_killed_is_named(after_s):
    with World(ENDLESS, 2) as ranks:
        killer = threading.Timer(after_s, os.kill, (ranks.process_ids[1], signal.SIGKILL))
        killer.start()
        try:
            with pytest.raises(EngineError, match=r"rank 1 \(process \d+\) was ended by SIGKILL"):
                next(ranks.points())
        finally:
            killer.cancel()


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them():
    program = (
        "from longhelix.measure.collectives import CollectivesJob\n"
        "from longhelix.measure.world import World\n"
        "ranks = World(CollectivesJob(2, (2048,), 10**9), 2)\n"
        "print(*ranks.process_ids.values(), flush=True)\n"
        "next(ranks.points())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=60)
    assert not alive
