"""Processes that are forked from one that has imported what ranks need, as the process that asks for them sees them."""

import fcntl
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import IO

from longhelix.errors import EngineError

LONGEST_REQUEST_BYTES = 1 << 16
_IMPORT_S = 600.0  # the longest that a disk may take to give what ranks import
_STATUS_BYTES = 16


class Process:
    """A process that runs the `main` of a module and ends with the status that it returns.

    pid: its id, and that of its process group. stdin, stdout, stderr: our ends of those that were asked for as
    subprocess.PIPE, for text. is_orphan: the process that it was forked from ended first, and it has then ended itself.
    """

    def __init__(self, pid: int, report: IO[bytes], pipes: Mapping[str, IO[str]]) -> None:
        self.pid = pid
        self.stdin, self.stdout, self.stderr = (pipes.get(name) for name in ("stdin", "stdout", "stderr"))
        self.is_orphan = False
        self._report = report
        self._status: int | None = None
        self._asker = os.getpid()
        self._lock = threading.RLock()

    def poll(self) -> int | None:
        """Its exit status, minus the signal's number if one ended it; None while it runs."""
        return self.wait(0.0)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Wait until it has ended, for at most `timeout_s`; returns what `poll` does. A copy of the process that asked
        for it knows nothing of it, and is told 0."""
        if os.getpid() != self._asker:
            return 0
        if self._status is not None:
            return self._status
        poll = select.poll()
        poll.register(self._report, select.POLLIN)
        if poll.poll(None if timeout_s is None else 1000 * timeout_s):
            with self._lock:
                if self._status is None:
                    found = os.read(self._report.fileno(), _STATUS_BYTES)
                    self.is_orphan = not found
                    self._status = int(found or 1)
        return self._status

    def close(self) -> None:
        """Close our ends of its pipes, once it has ended."""
        for pipe in (self.stdin, self.stdout, self.stderr, self._report):
            if pipe is not None:
                pipe.close()


class ForkServer:
    """`longhelix.workers.fork_server`, a process beside this one, with which it ends.

    What is forked from it has the environment, the cores, the user and the limits that it was started with.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start it; it imports what ranks need while this process goes on."""
        self.users = 0  # that are about to start processes, by `fork_server`
        self._lock = threading.RLock()
        self._processes: list[Process] = []
        self._requests, served = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.settimeout(_IMPORT_S)
        served.setblocking(True)
        with served:
            place = fcntl.fcntl(served, fcntl.F_DUPFD_CLOEXEC, 3)  # 0 to 2 are the server's streams
            try:
                self._server = subprocess.Popen(
                    # -P: a rank imports nothing from the directory that the user happens to stand in.
                    [sys.executable, "-P", "-m", "longhelix.workers.fork_server", str(place), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    stdout=2,
                    env=environment,
                    pass_fds=[place],
                    # A signal to the group of the process that starts it is that one's alone.
                    process_group=0,
                )
            finally:
                os.close(place)
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
        """Whether nobody is about to start a process, and all that it has forked has ended."""
        with self._lock:
            return not self.users and not self._running()

    def start(self, command: list[str], **streams: int | None) -> Process:
        """Fork a process, as soon as the server is up.

        command: a module and its arguments. streams: stdin, stdout and stderr: subprocess.PIPE, subprocess.DEVNULL, a
        descriptor, or None for this process's own. Raises EngineError if it cannot be.
        """
        with ExitStack() as theirs, ExitStack() as ours, self._lock:
            sent: list[int] = []
            pipes: dict[str, IO[str]] = {}
            for number, name in enumerate(("stdin", "stdout", "stderr")):
                given, pipe = _stream(number, streams.get(name))
                sent.append(given)
                theirs.callback(os.close, given)
                if pipe is not None:
                    pipes[name] = ours.enter_context(pipe)
            sent.append(_directory())
            theirs.callback(os.close, sent[-1])
            read, write = os.pipe()
            report = ours.enter_context(open(read, "rb", buffering=0))
            sent.append(write)
            theirs.callback(os.close, write)
            process = Process(self._ask(command, sent), report, pipes)
            ours.pop_all()
            self._processes = [process, *self._running()]
        return process

    def _ask(self, command: list[str], descriptors: list[int]) -> int:
        """The id of a process that is forked for it."""
        request = json.dumps(command).encode()
        assert len(request) <= LONGEST_REQUEST_BYTES
        try:
            with suppress(ConnectionError):  # it has ended
                socket.send_fds(self._requests, [request], descriptors)
            answer = self._answer()
        except TimeoutError:
            self.close()
            raise EngineError(f"ranks cannot start: what they import takes longer than {_IMPORT_S:.0f} s") from None
        except BaseException:  # an interrupt
            self._abandon()
            raise
        if not answer:
            status = self._server.wait()
            self.close()
            why = "failed, and the reason is printed above" if status >= 0 else f"was ended by {signal_name(-status)}"
            raise EngineError(f"ranks cannot start: the process that imports what they need {why}")
        if "error" in answer:
            raise EngineError(f"a rank's process cannot start: {answer['error']}")
        return answer["process_id"]

    def _abandon(self) -> None:
        """End a process that was asked for, and of which nobody would know."""
        try:
            if self.users > 1 or self._running():
                with suppress(KeyError, ProcessLookupError):
                    os.killpg(self._answer()["process_id"], signal.SIGKILL)
                return
        except BaseException:  # another interrupt
            self.close()
            raise
        self.close()

    def _running(self) -> list[Process]:
        return [process for process in self._processes if process.poll() is None]

    def _answer(self) -> dict:
        """What the server says next; nothing once it has ended."""
        with suppress(ConnectionError):
            return json.loads(self._requests.recv(LONGEST_REQUEST_BYTES) or "{}")
        return {}


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
    key = inheritance(environment)
    with _lock:
        if key not in _servers or not _servers[key].is_up:
            for other, server in list(_servers.items()):
                if server.is_idle:
                    server.close()
                    del _servers[other]
            _servers[key] = ForkServer(environment)
        return _servers[key]


def inheritance(environment: Mapping[str, str]) -> tuple[object, ...]:
    """What a process gets from the one that starts it, and keeps."""
    limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    return (
        frozenset(environment.items()),
        frozenset(os.sched_getaffinity(0)),
        os.getresuid(),
        os.getresgid(),
        *map(resource.getrlimit, limits),
    )


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _stream(number: int, wanted: int | None) -> tuple[int, IO[str] | None]:
    """What a process gets as its standard stream `number`, and our end if that is a pipe."""
    if wanted == subprocess.PIPE:
        read, write = os.pipe()
        return (read, open(write, "w")) if number == 0 else (write, open(read))
    if wanted == subprocess.DEVNULL:
        return os.open(os.devnull, os.O_RDWR), None
    return os.dup(number if wanted is None else wanted), None


def _directory() -> int:
    """The directory that this process stands in, as a descriptor: it may have been removed or renamed."""
    try:
        return os.open(".", os.O_PATH)
    except PermissionError:  # who started this process could stand there, and this user cannot
        return os.open("/", os.O_PATH)


def _end(server: subprocess.Popen[bytes], requests: socket.socket) -> None:
    requests.close()
    server.kill()
    server.wait()


def _forget() -> None:
    """In a copy of this process: what was forked for this one is not the copy's."""
    global _lock
    _lock = threading.RLock()
    for server in _servers.values():
        server.close.detach()
        server._requests.close()
    _servers.clear()


os.register_at_fork(after_in_child=_forget)
