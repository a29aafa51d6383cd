"""Fork servers that import nothing for ranks, and so begin at once: whom they end, and what they say."""

import os
import signal
import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import psutil
import pytest
from world import ENVIRONMENT

from longhelix.engine.workers import process
from longhelix.engine.workers.environment import rank_environment
from longhelix.engine.workers.fork_server import server_for
from longhelix.engine.workers.ranks import Ranks
from longhelix.errors import EngineError

pytestmark = pytest.mark.dist

LIGHT = "import sys, types\nsys.modules['longhelix.engine.workers.worker'] = types.ModuleType('worker')\n"


@pytest.fixture
def light(tmp_path, monkeypatch):
    """The environment of a server that imports nothing for ranks. What it prints it keeps until it flushes."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    (tmp_path / "sitecustomize.py").write_text(LIGHT)
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path), ENVIRONMENT["PYTHONPATH"]])}


@pytest.fixture
def server(light):
    server = server_for(rank_environment() | light)
    yield server
    server.close()


@pytest.fixture
def ranks(light, server):
    """Eight of them, forked from that server, which stay."""
    with Ranks() as ranks:
        ranks.start("plain_rank", range(8), *8 * ["stay"], environment=light, stdout=subprocess.PIPE)
        for started in ranks.processes.values():
            started.stdout.readline()
        yield ranks


def children(server):
    return [child.pid for child in psutil.Process(server.pid).children()]


def fail(*_):
    raise TimeoutError("too slow for me")


@pytest.mark.parametrize("moment", ["while it imports", "before it answers", "after it has answered"])
def test_what_a_handler_of_a_signal_raises_is_the_programs(server, monkeypatch, moment):
    """Whatever it is: it ends what was asked for, and nothing else."""
    before = signal.signal(signal.SIGUSR1, fail)
    later = threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGUSR1])
    if moment != "while it imports":
        other = server.start(["plain_process", "stay"], stdin=subprocess.DEVNULL)
    if moment == "after it has answered":
        monkeypatch.setattr(process, "_end_of", Mock(side_effect=fail))
    else:
        os.kill(server.pid, signal.SIGSTOP)
        later.start()
    try:
        with pytest.raises(TimeoutError, match="too slow for me"):
            server.start(["plain_process", "stay"], stdin=subprocess.DEVNULL)
    finally:
        os.kill(server.pid, signal.SIGCONT)
        later.cancel()
        signal.signal(signal.SIGUSR1, before)
    monkeypatch.undo()
    if moment == "while it imports":
        other = server.start(["plain_process", "stay"], stdin=subprocess.DEVNULL)
    last = server.start(["plain_process", "group"], stdin=subprocess.DEVNULL)  # in order: all else is done by then
    last.wait(60)
    last.close()
    deadline_s = time.monotonic() + 60
    while (found := children(server)) != [other.pid] and time.monotonic() < deadline_s:
        time.sleep(0.01)
    other.kill()
    assert found == [other.pid]
    assert server.is_up
    assert other.wait(60) == -signal.SIGKILL
    other.close()


def test_a_rank_that_crashes_while_its_server_stands_still_is_not_blamed_on_the_servers_end(server, ranks, monkeypatch):
    """And all ranks together wait once for what it does not say."""
    monkeypatch.setattr(process, "_STATUS_S", 1.0)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        os.kill(ranks.process_ids[3], signal.SIGSEGV)
        assert ranks.processes[3].await_end(60)
        words = rf"^rank 3 \(process {ranks.process_ids[3]}\) ended with an unknown status: .* not respond$"
        with pytest.raises(EngineError, match=words):
            ranks.check_signals()
        began_s = time.monotonic()
        ranks.close()
        assert time.monotonic() - began_s < 4
        assert server.is_up
    finally:
        os.kill(server.pid, signal.SIGCONT)


def test_ranks_that_this_user_may_not_end_are_ended_by_their_server(ranks, monkeypatch):
    monkeypatch.setattr(os, "killpg", Mock(side_effect=PermissionError))
    ranks.close()
    assert set(ranks.statuses().values()) == {-signal.SIGKILL}
    assert not any(psutil.pid_exists(pid) for pid in ranks.process_ids.values())


@pytest.mark.parametrize("end", ["sys.stdin.read()", "os._exit(0)", ""])
def test_it_says_nothing_when_the_process_that_asks_ends_before_it_has_read_all(light, end):
    program = (
        "import os, sys\nfrom longhelix.engine.workers.environment import rank_environment\n"
        "from longhelix.engine.workers.fork_server import server_for\nserver = server_for(rank_environment())\n"
        f"server.await_prepared()\nprint(server.pid, flush=True)\n{end}\n"
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", program], env=os.environ | light, text=True, **pipes) as asker:
        assert int(asker.stdout.readline())
        if "read" in end:
            asker.kill()
        assert asker.stderr.read() == ""  # until the server has ended, too


def test_what_an_import_prints_and_nobody_reads_is_no_error(light, tmp_path):
    """The program's standard error is a pipe that nobody reads. Its ranks print nothing of it either."""
    (tmp_path / "sitecustomize.py").write_text(LIGHT + "print('said by an import')\n")
    program = (
        "import os\nfrom longhelix.engine.workers.environment import rank_environment\n"
        "from longhelix.engine.workers.fork_server import server_for\n"
        "read, write = os.pipe()\nos.dup2(write, 2)\nos.close(read)\nserver = server_for(rank_environment())\n"
        "for _ in range(2):\n"
        "    forked = server.start(['plain_process', 'directory'], stdout=-1)\n"
        "    print(forked.stdout.read(), forked.wait(60))\n    forked.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | light, stdout=subprocess.PIPE, text=True, timeout=120
    )
    said = f'"{os.path.realpath(".")}"\n 0\n'
    assert (done.returncode, done.stdout) == (0, "said by an import\n" + 2 * said)


def test_a_process_whose_output_nobody_reads_ends_with_its_status(light, server, tmp_path):
    (tmp_path / "prints.py").write_text("def main():\n    print('lost', end='')\n    return 3\n")
    read, write = os.pipe()
    os.close(read)
    forked = server.start(["prints"], stdout=write)
    os.close(write)
    assert forked.wait(60) == 3
    forked.close()
