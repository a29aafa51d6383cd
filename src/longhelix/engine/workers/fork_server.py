"""The process that ranks are forked from, `longhelix.engine.workers.forking`, as its parent sees it."""

import fcntl
import itertools
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

from longhelix.engine.workers.process import Process, are_ready, is_open, signal_name, stream
from longhelix.errors import EngineError

LONGEST_REQUEST_BYTES = 1 << 16
_IMPORT_S = 600.0  # the longest that a disk may take to give what ranks import
_ANSWER_S = 60.0  # the longest that a fork may take
_END_S = 5.0


class ForkServer:
    """`longhelix.engine.workers.forking`, a process beside this one, with which it ends.

    What is forked from it has the environment, the cores, the user and the limits that it was started with.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it; it imports what ranks need while this process goes on. Raises EngineError if it cannot be."""
        self.users = 0  # that are about to start processes, by `fork_server`
        self._lock = threading.RLock()
        self._processes: list[Process] = []
        self._numbers = itertools.count(1)  # of requests
        self._is_prepared = False
        with _in_words():
            self._requests, served = map(_above_streams, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            with served:
                self._server = subprocess.Popen(
                    # -P: a rank imports nothing from the directory that the user happens to stand in.
                    [
                        sys.executable,
                        "-P",
                        "-m",
                        "longhelix.engine.workers.forking",
                        str(served.fileno()),
                        str(os.getpid()),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=2 if is_open(2) else subprocess.DEVNULL,
                    stderr=None if is_open(2) else subprocess.DEVNULL,
                    env=environment,
                    pass_fds=[served.fileno()],
                    # A signal to the group of the process that starts it is that one's alone.
                    process_group=0,
                )
        # Called as this process exits, too, and then after those who have started processes ended them.
        self.close = weakref.finalize(self, _end, self._server, self._requests)

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def is_up(self) -> bool:
        return self.close.alive and self._server.poll() is None

    @property
    def is_idle(self) -> bool:
        """Whether nobody is about to start a process, and all that it has forked has ended and is closed."""
        return not self.users and all(process.is_closed for process in self._processes)

    def start(self, command: list[str], **streams: int | None) -> Process:
        """Fork a process, as soon as the server is prepared.

        command: a module and its arguments. streams: stdin, stdout and stderr: subprocess.PIPE, subprocess.DEVNULL, a
        descriptor, or None for this process's own. Raises EngineError if it cannot be.
        """
        number = next(self._numbers)
        try:
            with self._lock:
                # First, because a copy of this process that another thread makes meanwhile would keep pipes open.
                self.await_prepared()
                process = self._fork(number, command, streams)
                self._processes = [process, *(other for other in self._processes if not other.is_closed)]
                return process
        except BaseException:  # such as an interrupt, after which nobody would know of it
            self._take_back(number)
            raise

    def await_prepared(self) -> None:
        """Wait until it has imported what ranks need. Raises EngineError if it cannot."""
        with self._lock:
            if self._is_prepared and self.close.alive:
                return
            # Its first message is read only with the first answer: an interrupt loses nothing.
            self._is_prepared = bool(self._receive(_IMPORT_S, socket.MSG_PEEK))

    def _fork(self, number: int, command: list[str], streams: Mapping[str, int | None]) -> Process:
        with ExitStack() as theirs, ExitStack() as ours:
            sent: list[int] = []
            pipes: dict[str, IO[str]] = {}
            with _in_words():
                for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
                    given, pipe = stream(descriptor, streams.get(name))
                    sent.append(given)
                    theirs.callback(os.close, given)
                    if pipe is not None:
                        pipes[name] = ours.enter_context(pipe)
                sent.append(_directory())
                theirs.callback(os.close, sent[-1])
                report, reports = socket.socketpair()
                ours.enter_context(report)
                sent.append(theirs.enter_context(reports).fileno())
            process = Process(self._ask(number, command, sent), report, pipes, partial(self._take_back, number))
            ours.pop_all()
        return process

    def _ask(self, number: int, command: list[str], descriptors: list[int]) -> int:
        """The id of a process that is forked for it."""
        request = json.dumps([number, command]).encode()
        assert len(request) <= LONGEST_REQUEST_BYTES
        with suppress(ConnectionError):  # it has ended
            socket.send_fds(self._requests, [request], descriptors)
        answer = json.loads(self._receive(_ANSWER_S))
        while answer["number"] != number:  # that of one whose asker was interrupted
            answer = json.loads(self._receive(_ANSWER_S))
        if "error" in answer:
            raise EngineError(f"ranks cannot start: {answer['error']}")
        return answer["process_id"]

    def _take_back(self, number: int) -> None:
        with suppress(OSError):  # it has ended, and so does what it has forked
            self._requests.send(json.dumps([number, []]).encode())

    def _receive(self, timeout_s: float, flags: int = 0) -> bytes:
        """What the server says next. Raises EngineError, and closes it, if it says nothing."""
        failed = "ranks cannot start: the process that they are forked from"
        if not self.close.alive:
            raise EngineError(f"{failed} has ended")
        if not are_ready([self._requests], timeout_s):
            self.close()
            raise EngineError(f"{failed} has said nothing for {timeout_s:.0f} s")
        found = b""
        with suppress(ConnectionError):
            found = self._requests.recv(LONGEST_REQUEST_BYTES, flags)
        if not found:
            status = self._server.wait()
            self.close()
            if status < 0:
                raise EngineError(f"{failed} was ended by {signal_name(-status)}")
            raise EngineError(f"{failed} failed, and the reason is printed above")
        return found


_servers: dict[tuple[object, ...], ForkServer] = {}
_lock = threading.RLock()


@contextmanager
def fork_server(environment: Mapping[str, str]) -> Iterator[ForkServer]:
    """The one that forks processes as this thread would start them, with this environment, in a `with` statement that
    keeps it up."""
    with _lock:
        server = server_for(environment)
        server.users += 1
    try:
        yield server
    finally:
        with _lock:
            server.users -= 1


def server_for(environment: Mapping[str, str]) -> ForkServer:
    """The same, but it may end before it is used. It is started if it does not run; then those end that are idle."""
    with _in_words():
        key = inheritance(environment)
    with _lock:
        if key not in _servers or not _servers[key].is_up:
            for other, server in list(_servers.items()):
                if server.is_idle:
                    server.close()
                    del _servers[other]
            _servers[key] = ForkServer(environment)
        return _servers[key]


@contextmanager
def _in_words() -> Iterator[None]:
    """What the system refuses is an EngineError."""
    try:
        yield
    except OSError as error:
        raise EngineError(f"ranks cannot start: {error}") from error


def inheritance(environment: Mapping[str, str]) -> tuple[object, ...]:
    """What a process gets from the one that starts it, and keeps."""
    limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    return (
        frozenset(environment.items()),
        frozenset(os.sched_getaffinity(0)),
        os.getresuid(),
        os.getresgid(),
        tuple(os.getgroups()),
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getscheduler(0),
        *_umask(),
        *map(resource.getrlimit, limits),
    )


def _directory() -> int:
    """The directory that this process stands in, as a descriptor: it may have been removed or renamed."""
    try:
        return os.open(".", os.O_PATH)
    except PermissionError:  # who started this process could stand there, and this user cannot
        return os.open("/", os.O_PATH)


def _end(server: subprocess.Popen[bytes], requests: socket.socket) -> None:
    requests.close()  # with which it ends
    with suppress(PermissionError):  # this process has another user by now
        server.kill()
    with suppress(subprocess.TimeoutExpired):
        server.wait(_END_S)


def _above_streams(requests: socket.socket) -> socket.socket:
    """The same without a time limit, as a descriptor that no standard stream has, even where one of them is closed."""
    with requests:
        above = socket.socket(fileno=fcntl.fcntl(requests, fcntl.F_DUPFD_CLOEXEC, 3))
    above.setblocking(True)
    return above


def _umask() -> list[str]:
    """That of this process, which cannot be asked for without setting it for all threads."""
    return [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask")]


def _forget() -> None:
    """In a copy of this process: what was forked for this one is not the copy's."""
    global _lock
    _lock = threading.RLock()
    for server in _servers.values():
        server.close.detach()
        server._server.returncode = 0  # subprocess would say that it runs on
        server._requests.close()
    _servers.clear()


os.register_at_fork(after_in_child=_forget)
