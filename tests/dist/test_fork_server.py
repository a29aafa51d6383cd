"""The process that ranks are forked from: when there is one, what it hands on, and what happens when it goes."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest.mock import DEFAULT, Mock

import psutil
import pytest
from world import ENVIRONMENT

from longhelix.errors import EngineError
from longhelix.workers.environment import rank_environment
from longhelix.workers.process import fork_server, inheritance, server_for
from longhelix.workers.ranks import Ranks

pytestmark = pytest.mark.dist


# One of these tests' own: the worlds of others have processes in theirs.
TESTS = ENVIRONMENT | {"LONGHELIX_TEST": "0"}


@pytest.fixture
def environment():
    return rank_environment() | TESTS


@pytest.fixture
def server(environment):
    return server_for(environment)


def asked(server, question):
    """What a process that is forked says to a question."""
    forked = server.start(["plain_process", question], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    answer = forked.stdout.read()
    assert forked.wait(60) == 0
    forked.close()
    return json.loads(answer)


def await_end(pid):
    deadline_s = time.monotonic() + 60
    while psutil.pid_exists(pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


def await_end_of(server):
    deadline_s = time.monotonic() + 60
    while server.is_up and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not server.is_up


def test_there_is_one_while_environment_and_cores_stay_the_same(server, environment, monkeypatch):
    assert server_for(environment) is server
    running = server.start(["plain_process", "stay"])
    changed = environment | {"LONGHELIX_TEST": "1"}
    other = server_for(changed)
    assert other is not server
    assert (server.is_up, server.is_idle, other.is_up) == (True, False, True)
    assert server_for(environment) is server
    assert asked(other, "environment")["LONGHELIX_TEST"] == "1"
    os.killpg(running.pid, signal.SIGKILL)
    assert running.wait(60) == running.poll() == -signal.SIGKILL
    running.close()
    assert server.is_idle
    with fork_server(changed) as used:
        assert used is other
        os.kill(server.pid, signal.SIGKILL)
        await_end_of(server)
        assert server_for(environment) is not server
        assert used.is_up  # although it has no process
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1000})
    assert server_for(environment) is not used
    assert not used.is_up


@pytest.mark.parametrize(
    ("place", "name", "found"),
    [
        (os, "sched_getaffinity", lambda pid: {1000}),
        (os, "getresuid", lambda: (7, 7, 7)),
        (os, "getresgid", lambda: (7, 7, 7)),
        (resource, "getrlimit", lambda which: (7, 7)),
    ],
)
def test_what_a_process_keeps_of_who_starts_it_tells_servers_apart(place, name, found, monkeypatch):
    mine = inheritance({"A": "1"})
    assert inheritance({"A": "1"}) == mine
    assert inheritance({"A": "2"}) != mine
    monkeypatch.setattr(place, name, found)
    assert inheritance({"A": "1"}) != mine


def test_it_has_torch_and_no_thread_but_its_own(server):
    """Those that numpy's BLAS starts as it is imported end, and know it, before a fork."""
    assert asked(server, "imports torch")
    assert psutil.Process(server.pid).num_threads() == 1


def test_what_ranks_import_looks_for_no_device():
    """A process that is forked from one that has asked for CUDA's devices cannot use them."""
    program = (
        "import torch\n"
        "def found(*_): raise SystemExit(9)\n"
        "torch._C._cuda_getDeviceCount = torch._C._cuda_init = torch.cuda._lazy_init = found\n"
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda.current_device = found\n"
        "import longhelix.workers.worker\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_process_stands_where_it_was_asked_for(server, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert asked(server, "directory") == str(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    assert asked(server, "directory") == str(tmp_path / "there")


def test_a_process_has_its_streams_and_nothing_else_that_is_open(server, tmp_path):
    with (tmp_path / "errors").open("w") as errors:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        forked = server.start(["plain_process", "echo"], stderr=errors.fileno(), **pipes)
    print("a line", file=forked.stdin, flush=True)
    assert forked.stdout.readline() == "a line\n"
    assert forked.poll() is None
    assert asked(server, "descriptors") == 4  # the three streams, and the pipe for its status
    forked.stdin.close()
    assert forked.wait(60) == 3
    forked.close()
    assert (tmp_path / "errors").read_text() == "done\n"


def test_what_was_asked_for_at_once_comes_to_who_asked(server):
    said = {}
    threads = [threading.Thread(target=lambda n=n: said.update({n: asked(server, "group")})) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(said.values())) == 8  # each leads a group of its own


def test_ranks_end_with_a_server_that_is_killed(environment):
    with Ranks() as ranks:
        ranks.start("plain_rank", range(1), "stay", environment=TESTS, stdout=subprocess.PIPE)
        assert ranks.processes[0].stdout.readline()
        server = server_for(environment)
        os.kill(server.pid, signal.SIGKILL)
        ranks.wait(60)
        assert ranks.statuses() == {0: 1}
        await_end(ranks.process_ids[0])
        words = rf"rank 0 \(process {ranks.process_ids[0]}\) ended because the process that ranks are forked from did"
        with pytest.raises(EngineError, match=words):
            ranks.check_signals()
    assert not server.is_up
    with pytest.raises(EngineError, match=r"ranks cannot start: the process that imports .* was ended by SIGKILL"):
        server.start(["plain_process", "group"])
    assert asked(server_for(environment), "group")


def test_an_import_that_fails_is_an_error_in_words(tmp_path, capfd):
    (tmp_path / "torch.py").write_text("raise ImportError('no such torch')")
    server = server_for(rank_environment() | {"PYTHONPATH": str(tmp_path)})
    with pytest.raises(EngineError, match="imports what they need failed, and the reason is printed above"):
        server.start(["plain_process", "group"])
    assert "no such torch" in capfd.readouterr().err


def test_a_process_that_the_system_refuses_is_an_error_in_words(tmp_path):
    refusing = "import os\ndef fork(): raise OSError(11, 'Resource temporarily unavailable')\nos.fork = fork\n"
    (tmp_path / "sitecustomize.py").write_text(refusing)
    server = server_for(rank_environment() | {"PYTHONPATH": str(tmp_path)})
    for _ in range(2):
        with pytest.raises(EngineError, match=r"a rank's process cannot start: .*Resource temporarily unavailable"):
            server.start(["plain_process", "group"])
    assert server.is_up


@pytest.mark.parametrize("alone", [True, False])
def test_an_interrupt_while_a_process_starts_leaves_none(server, tmp_path, monkeypatch, alone):
    """The server ends, too, unless others have processes of it."""
    others = [] if alone else [server.start(["plain_process", "stay"])]
    asked(server, "group")  # it is up
    said = Mock(wraps=server._answer, side_effect=[KeyboardInterrupt, DEFAULT])
    monkeypatch.setattr(server, "_answer", said)
    place = ["--rank", "0", "--directory", str(tmp_path), "--parent", str(server.pid)]
    children = psutil.Process(server.pid).children
    with pytest.raises(KeyboardInterrupt):
        server.start(["plain_rank", *place, "stay"])
    monkeypatch.undo()
    assert server.is_up != alone
    for other in others:
        asked(server, "group")  # by now it has waited for what has ended
        assert [child.pid for child in children()] == [other.pid]
        os.killpg(other.pid, signal.SIGKILL)
        other.wait(60)
        other.close()


def test_it_serves_programs_with_many_open_files_blocked_signals_and_time_limits_of_sockets(environment, monkeypatch):
    """And who stands where this user may not. A status is told although SIGCHLD was blocked where the server began."""
    socket.setdefaulttimeout(0.001)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    try:
        server = server_for(environment | {"LONGHELIX_TEST": "2"})
    finally:
        socket.setdefaulttimeout(None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    opened, refused = os.open, Mock(side_effect=lambda path, flags: refuse() if path == "." else opened(path, flags))
    monkeypatch.setattr(os, "open", refused)
    assert asked(server, "directory") == "/"
    monkeypatch.undo()
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert max(many) > 1024
        assert asked(server, "group")
        forked = server.start(["plain_process", "stay"])
        os.killpg(forked.pid, signal.SIGKILL)
        assert forked.wait(60) == -signal.SIGKILL
        forked.close()
    finally:
        for descriptor in many:
            os.close(descriptor)


def refuse():
    raise PermissionError


def test_two_engines_that_start_at_once_do_not_end_each_others_server(environment):
    """Threads with environments of their own, none of which has a server yet."""
    said, errors = {}, []

    def ask(number):
        try:
            with fork_server(environment | {"LONGHELIX_TEST": f"thread {number}"}) as server:
                said[number] = asked(server, "environment")["LONGHELIX_TEST"]
        except EngineError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (said, errors) == ({0: "thread 0", 1: "thread 1"}, [])


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_copy_of_a_process_has_a_server_of_its_own_and_leaves_ranks_alone(server, environment):
    with Ranks() as ranks:
        ranks.start("plain_rank", range(1), "stay", environment=TESTS, stdout=subprocess.PIPE)
        ranks.processes[0].stdout.readline()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                ranks.close()
                other = server_for(environment)
                os.write(write, json.dumps([other.pid, asked(other, "group")]).encode())
                other.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        pid, answered = json.loads(os.read(read, 100))
        os.close(read)
        assert pid != server.pid
        assert answered != asked(server, "group")
        assert ranks.statuses() == {}
        assert ranks.directory.exists()


def test_it_ends_with_the_process_that_asks():
    program = (
        "import sys\nfrom longhelix.workers.environment import rank_environment\n"
        "from longhelix.workers.process import server_for\nserver = server_for(rank_environment())\n"
        "print(server.pid, flush=True)\nsys.stdin.read()\n"
    )
    for by_signal in (True, False):
        with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as asker:
            pid = int(asker.stdout.readline())
            assert psutil.pid_exists(pid)
            if by_signal:
                asker.kill()
        if by_signal:
            await_end(pid)
        assert not psutil.pid_exists(pid)
