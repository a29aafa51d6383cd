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

from longhelix.engine.workers import fork_server as servers
from longhelix.engine.workers import process
from longhelix.engine.workers.environment import rank_environment
from longhelix.engine.workers.fork_server import fork_server, inheritance, server_for
from longhelix.engine.workers.ranks import Ranks
from longhelix.errors import EngineError
from tiers import few

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


def end(forked):
    os.killpg(forked.pid, signal.SIGKILL)
    assert forked.wait(60) == -signal.SIGKILL
    forked.close()


def in_threads(action, size):
    """`action`, which gets a number, in several threads at once."""
    threads = [threading.Thread(target=action, args=(number,)) for number in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


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


@pytest.mark.slow
def test_there_is_one_while_environment_and_cores_stay_the_same(server, environment, monkeypatch):
    assert server_for(environment) is server
    running = server.start(["plain_process", "stay"])
    changed = environment | {"LONGHELIX_TEST": "1"}
    other = server_for(changed)
    assert other is not server
    assert (server.is_up, server.is_idle, other.is_up) == (True, False, True)
    assert server_for(environment) is server
    assert asked(other, "environment")["LONGHELIX_TEST"] == "1"
    end(running)
    assert running.poll() == -signal.SIGKILL
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
        (os, "getgroups", lambda: [7]),
        (os, "getpriority", lambda which, who: 7),
        (os, "sched_getscheduler", lambda pid: 7),
        (servers, "_umask", lambda: ["Umask: 0007"]),
        (resource, "getrlimit", lambda which: (7, 7)),
    ],
)
def test_what_a_process_keeps_of_who_starts_it_tells_servers_apart(place, name, found, monkeypatch):
    mine = inheritance({"A": "1"})
    assert inheritance({"A": "1"}) == mine
    assert inheritance({"A": "2"}) != mine
    monkeypatch.setattr(place, name, found)
    assert inheritance({"A": "1"}) != mine


def test_so_does_the_mask_of_its_files():
    mask = os.umask(0o027)
    try:
        assert servers._umask() == ["Umask:\t0027"]
    finally:
        os.umask(mask)


def test_it_has_torch_and_no_thread_but_its_own(server):
    """Those that numpy's BLAS starts as it is imported end, and know it, before a fork."""
    assert asked(server, "imports torch")
    assert psutil.Process(server.pid).num_threads() == 1


@pytest.mark.slow
def test_what_ranks_import_looks_for_no_device():
    """A process that is forked from one that has asked for CUDA's devices cannot use them."""
    program = (
        "import torch\n"
        "def found(*_): raise SystemExit(9)\n"
        "torch._C._cuda_getDeviceCount = torch._C._cuda_init = torch.cuda._lazy_init = found\n"
        "torch.cuda.is_available = torch.cuda.device_count = torch.cuda.current_device = found\n"
        "import longhelix.engine.workers.worker\n"
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
    in_threads(lambda number: said.update({number: asked(server, "group")}), 8)
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
        words = rf"rank 0 \(process {ranks.process_ids[0]}\) ended because the fork server ended"
        with pytest.raises(EngineError, match=words):
            ranks.check_signals()
    assert not server.is_up
    with pytest.raises(EngineError, match=r"ranks cannot start: the fork server was ended by SIGKILL"):
        server.start(["plain_process", "group"])
    assert asked(server_for(environment), "group")


def test_an_import_that_fails_is_an_error_in_words_for_all_who_wait(tmp_path, capfd):
    """At once, whatever threads it has begun."""
    began = "import threading, time\nthreading.Thread(target=time.sleep, args=(100,)).start()\n"
    (tmp_path / "torch.py").write_text(began + "raise ImportError('no such torch')")
    began_s = time.monotonic()
    server, errors = server_for(rank_environment() | {"PYTHONPATH": str(tmp_path)}), []

    def ask(number):
        with pytest.raises(EngineError) as error:
            server.start(["plain_process", "group"])
        errors.append(str(error.value))

    in_threads(ask, 3)
    assert time.monotonic() - began_s < 50
    failed = "ranks cannot start: the fork server"
    assert sorted(errors) == [
        f"{failed} failed with status 1: the reason is printed above",
        *2 * [f"{failed} has ended"],
    ]
    assert "no such torch" in capfd.readouterr().err


@pytest.mark.slow
def test_a_process_that_the_system_refuses_is_an_error_in_words(tmp_path):
    refusing = "import os\ndef fork(): raise OSError(11, 'Resource temporarily unavailable')\nos.fork = fork\n"
    (tmp_path / "sitecustomize.py").write_text(refusing)
    server = server_for(rank_environment() | {"PYTHONPATH": str(tmp_path)})
    for _ in range(2):
        with pytest.raises(EngineError, match=r"ranks cannot start: .*Resource temporarily unavailable"):
            server.start(["plain_process", "group"])
    assert server.is_up


@pytest.mark.parametrize("interrupted", few(["before it answers", "before it is asked", "after it has answered"]))
def test_an_interrupt_while_a_process_starts_ends_that_one_alone(server, monkeypatch, interrupted):
    """At once, whoever else has processes of this server."""
    other = server.start(["plain_process", "stay"])
    children = psutil.Process(server.pid).children
    if interrupted == "before it is asked":
        monkeypatch.setattr(socket, "send_fds", Mock(side_effect=KeyboardInterrupt))
    elif interrupted == "before it answers":
        monkeypatch.setattr(server, "_receive", Mock(side_effect=KeyboardInterrupt))
    else:
        monkeypatch.setattr(process, "_end_of", Mock(side_effect=KeyboardInterrupt))
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        server.start(["plain_process", "stay"])
    assert time.monotonic() - began_s < 30  # nobody waits for what may never come
    monkeypatch.undo()
    for _ in range(2):
        asked(server, "group")  # in order: by now the server has ended what nobody knows of, and told of its end
    assert [child.pid for child in children()] == [other.pid]
    end(other)


@pytest.mark.slow
def test_an_interrupt_while_it_imports_leaves_a_server_that_can_be_asked(environment, monkeypatch):
    """Whether or not somebody reads its first message meanwhile."""
    server = server_for(environment | {"LONGHELIX_TEST": "interrupted"})
    receive = Mock(wraps=server._receive, side_effect=[KeyboardInterrupt, DEFAULT, DEFAULT, DEFAULT])
    monkeypatch.setattr(server, "_receive", receive)
    with pytest.raises(KeyboardInterrupt):
        server.start(["plain_process", "group"])
    assert asked(server, "group")


@pytest.mark.slow
def test_a_process_is_known_to_have_ended_while_its_server_stands_still(environment, monkeypatch):
    monkeypatch.setattr(process, "_STATUS_S", 0.5)
    with Ranks() as ranks:
        ranks.start("plain_rank", range(1), "stay", environment=TESTS, stdout=subprocess.PIPE)
        ranks.processes[0].stdout.readline()
        server = server_for(environment)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            ranks.close()
            assert "does not respond" in ranks.processes[0].untold
            ranks.check_signals()  # its end is nobody's fault
            monkeypatch.setattr(servers, "_ANSWER_S", 0.5)
            with pytest.raises(EngineError, match=r"ranks cannot start: .* has not answered for 0 s"):
                server.start(["plain_process", "group"])
        finally:
            if server.is_up:
                os.kill(server.pid, signal.SIGCONT)
    assert not server.is_up
    assert asked(server_for(environment), "group")


@pytest.mark.slow
def test_whoever_wants_another_server_does_not_wait_for_one_that_imports(tmp_path, environment):
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)")
    importing = environment | {"PYTHONPATH": str(tmp_path)}

    def ask():
        with pytest.raises(EngineError):
            server.start(["plain_process", "group"])

    with fork_server(importing) as server:
        waiting = threading.Thread(target=ask)
        waiting.start()
        try:
            assert asked(server_for(environment), "group")
            assert waiting.is_alive()
        finally:
            os.kill(server.pid, signal.SIGKILL)
            waiting.join()


@pytest.mark.slow
def test_what_the_import_started_and_ends_is_not_its_own(tmp_path):
    began = "import subprocess, sys\nif 'longhelix' in ' '.join(sys.orig_argv): subprocess.Popen(['true'])\n"
    (tmp_path / "sitecustomize.py").write_text(began)
    paths = os.pathsep.join([str(tmp_path), TESTS["PYTHONPATH"]])
    server = server_for(rank_environment() | {"PYTHONPATH": paths})
    forked = server.start(["plain_process", "stay"])
    assert asked(server, "group")
    end(forked)
    assert server.is_up


@pytest.mark.slow
def test_no_descriptor_is_left_is_an_error_in_words(server):
    asked(server, "group")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limit[1]))
    try:
        with pytest.raises(EngineError, match=r"ranks cannot start: .*Too many open files"):
            server.start(["plain_process", "group"])
        with pytest.raises(EngineError, match=r"ranks cannot start: .*Too many open files"):
            servers.ForkServer({})
        with pytest.raises(EngineError, match=r"ranks cannot start: .*Too many open files"):
            server_for({})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
    assert asked(server, "group")


@pytest.mark.parametrize(
    "program",
    [
        # Standard error is closed, and its number must go to nobody else.
        "os.close(2)\nassert started() == 0",
        # By another user than the one who started a server, which may not be ended, and may not run this Python.
        "assert started() == 0\nbefore = server\nos.setgid(54321)\nos.setuid(54321)\n"
        "try:\n    assert started() == 0 and server is not before\n"
        "except EngineError as error:\n    assert 'Permission denied' in str(error), error",
        # In a copy, where warnings are errors.
        "import warnings\nwarnings.simplefilter('error')\nassert started() == 0\nif not os.fork(): raise SystemExit\n"
        "assert os.wait()[1] == 0",
    ],
    ids=["no standard error", "another user", "a copy"],
)
@pytest.mark.slow
def test_unusual_programs_are_served(program, environment, tmp_path):
    begin = (
        "import os\nfrom longhelix.errors import EngineError\n"
        "from longhelix.engine.workers.environment import rank_environment\n"
        "from longhelix.engine.workers.fork_server import server_for\n"
        "def started():\n"
        "    global server\n    server = server_for(rank_environment())\n"
        "    forked = server.start(['plain_process', 'group'], stdout=-3)\n"
        "    status = forked.wait(60)\n    forked.close()\n    return status\n"
    )
    changed = environment | {"HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", begin + program], env=changed, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
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
        end(forked)
    finally:
        for descriptor in many:
            os.close(descriptor)


def refuse():
    raise PermissionError


@pytest.mark.slow
def test_two_engines_that_start_at_once_do_not_end_each_others_server(environment):
    """Threads with environments of their own, none of which has a server yet."""
    said, errors = {}, []

    def ask(number):
        try:
            with fork_server(environment | {"LONGHELIX_TEST": f"thread {number}"}) as server:
                said[number] = asked(server, "environment")["LONGHELIX_TEST"]
        except EngineError as error:
            errors.append(error)

    in_threads(ask, 2)
    assert (said, errors) == ({0: "thread 0", 1: "thread 1"}, [])


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.slow
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
        "import sys\nfrom longhelix.engine.workers.environment import rank_environment\n"
        "from longhelix.engine.workers.fork_server import server_for\nserver = server_for(rank_environment())\n"
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
