"""The processes of ranks: how they are started, what is noticed of them, and that nothing stays of them."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
from world import ENVIRONMENT

from longhelix.engine.workers.fork_server import ForkServer
from longhelix.engine.workers.process import Process
from longhelix.engine.workers.ranks import Ranks
from longhelix.errors import EngineError

pytestmark = pytest.mark.dist


def start(ranks, *tasks):
    """Ranks with a task each; returns what they say of their start."""
    ranks.start("plain_rank", range(len(tasks)), *tasks, environment=ENVIRONMENT, stdout=subprocess.PIPE)
    return [json.loads(process.stdout.readline()) for process in ranks.processes.values()]


def assert_nothing_left(process_ids, directory):
    assert not any(psutil.pid_exists(pid) for pid in process_ids)
    assert not directory.exists()


def test_ranks_know_their_place_read_nothing_and_have_the_environment_of_ranks(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    with Ranks() as ranks:
        said = start(ranks, "0", "0")
        assert stat.S_IMODE(ranks.directory.stat().st_mode) == 0o700
    same = {"directory": str(ranks.directory), "arguments": ["0", "0"], "stdin": "", "spins": "1000"}
    assert said == [same | {"rank": 0}, same | {"rank": 1}]


def test_ranks_import_nothing_from_the_directory_that_the_user_stands_in(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(tmp_path)
    with Ranks() as ranks:
        start(ranks, "0")
        ranks.wait(60)
        assert ranks.statuses() == {0: 0}


def test_whoever_a_signal_ended_is_named_and_nobody_else():
    with Ranks() as ranks:
        start(ranks, "3", "die", "stay")
        ranks.processes[1].wait()
        ranks.processes[0].wait()
        assert ranks.statuses() == {0: 3, 1: -signal.SIGKILL}
        with pytest.raises(EngineError, match=rf"^rank 1 \(process {ranks.process_ids[1]}\) was ended by SIGKILL$"):
            ranks.check_signals()


def test_ranks_that_were_ended_from_here_are_nobodys_fault():
    with Ranks() as ranks:
        start(ranks, "stay", "stay")
        ranks.kill()
        assert ranks.statuses() == {0: -signal.SIGKILL, 1: -signal.SIGKILL}
        ranks.check_signals()


def test_what_a_rank_has_started_ends_with_it():
    with Ranks() as ranks:
        start(ranks, "start a child")
        (child,) = psutil.Process(ranks.process_ids[0]).children()
        ranks.kill()
    child.wait(60)


def test_ranks_that_end_by_themselves_are_no_error():
    with Ranks() as ranks:
        start(ranks, "0", "3")
        with ranks.watched(timeout_s=60) as watch:
            ranks.wait(60)
            time.sleep(0.3)  # more than once the watch looks
        ranks.check_signals()
    assert watch.error is None


@pytest.mark.parametrize(
    ("task", "timeout_s", "words"), [("stay", 2, "took longer than 2 s"), ("die", 200, "rank 1 .* ended by SIGKILL")]
)
def test_the_watch_ends_all_when_time_is_up_or_one_was_killed(task, timeout_s, words):
    with Ranks() as ranks:
        start(ranks, "stay", task)
        with ranks.watched(timeout_s) as watch:
            ranks.processes[0].wait()  # without a limit of its own
        with pytest.raises(EngineError, match=words):
            raise watch.error
        assert len(ranks.statuses()) == 2


def test_waiting_ends_with_the_last_rank_or_with_the_time():
    with Ranks() as ranks:
        start(ranks, "0", "0")
        began_s = time.monotonic()
        ranks.wait(120)
        assert ranks.statuses() == {0: 0, 1: 0}
        assert time.monotonic() - began_s < 60
    with Ranks() as ranks:
        start(ranks, "0", "stay")
        ranks.wait(0.5)
        assert 1 not in ranks.statuses()


@pytest.mark.parametrize("own", [True, False], ids=["a directory of its own", "a directory that was made for it"])
def test_closing_leaves_nothing_and_may_be_repeated(tmp_path, own):
    made = tmp_path / "made"
    made.mkdir()
    ranks = Ranks(None if own else made)
    start(ranks, "stay", "0")
    ranks.close()
    assert_nothing_left(ranks.process_ids.values(), ranks.directory)
    assert made.exists() == own
    ranks.directory.mkdir(exist_ok=True)  # another's by now
    ranks.close()
    assert ranks.directory.exists()
    ranks.directory.rmdir()


def test_closing_that_was_interrupted_goes_on_where_it_was(monkeypatch):
    ranks = Ranks()
    start(ranks, "stay")
    monkeypatch.setattr(Process, "wait", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        ranks.close()
    assert ranks.directory.exists()
    monkeypatch.undo()
    ranks.close()
    assert_nothing_left(ranks.process_ids.values(), ranks.directory)


def test_a_start_that_fails_half_way_leaves_nothing(monkeypatch):
    started = ForkServer.start

    def second_fails(server, command, **streams):
        if command[command.index("--rank") + 1] == "1":
            raise EngineError("no more processes")
        return started(server, command, **streams)

    monkeypatch.setattr(ForkServer, "start", second_fails)
    with pytest.raises(EngineError, match="no more processes"), Ranks() as ranks:
        start(ranks, "stay", "stay")
    assert list(ranks.process_ids) == [0]
    assert_nothing_left(ranks.process_ids.values(), ranks.directory)


def test_an_interrupt_is_the_parents_to_handle():
    with Ranks() as ranks:
        start(ranks, "stay")
        os.kill(ranks.process_ids[0], signal.SIGINT)
        ranks.wait(1)
        assert ranks.statuses() == {}


@pytest.mark.slow
def test_nothing_is_left_when_the_parent_is_killed():
    program = (
        "import subprocess, sys\nfrom longhelix.engine.workers.ranks import Ranks\nranks = Ranks()\n"
        f"ranks.start('plain_rank', range(2), 'stay', 'stay', environment={ENVIRONMENT!r}, stdout=subprocess.PIPE)\n"
        "[process.stdout.readline() for process in ranks.processes.values()]\n"
        "print(*ranks.process_ids.values(), ranks.directory, flush=True)\nsys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        *process_ids, directory = parent.stdout.readline().decode().split()
        parent.kill()
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s and any(psutil.pid_exists(int(pid)) for pid in process_ids):
        time.sleep(0.1)
    assert_nothing_left(map(int, process_ids), Path(directory))
