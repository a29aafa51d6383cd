"""Client of the fork server. It starts `longhelix.engine.workers.forking`, which forks the processes of ranks."""

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
_IMPORT_S = 600.0  # longest time that the imports may take on a slow disk
_ANSWER_S = 60.0  # longest time that a fork may take
_END_S = 5.0


class ForkServer:
    """A process that runs `longhelix.engine.workers.forking` and ends when this process ends.

    Processes that are forked from it inherit the environment, the cores, the user and the resource limits with which it
    was started.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Start the server, which imports the modules that ranks need in the background.

        Raises:
            EngineError: the system cannot start it.
        """
        self.users = 0  # number of `fork_server` blocks that are active
        self._lock = threading.RLock()
        self._processes: list[Process] = []
        self._numbers = itertools.count(1)  # numbers of requests
        self._is_prepared = False
        with _in_words():
            self._requests, served = map(_above_streams, socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            with served:
                self._server = subprocess.Popen(
                    # -P: a rank must not import modules from the current directory.
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
                    # A signal to this process's group must not reach the server.
                    process_group=0,
                )
        # Also called when this process exits, after the owners of the forked processes have ended them.
        self.close = weakref.finalize(self, _end, self._server, self._requests)

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._server.pid

    @property
    def is_up(self) -> bool:
        """True if the server is running."""
        return self.close.alive and self._server.poll() is None

    @property
    def is_idle(self) -> bool:
        """True if no `fork_server` block is active and all processes that the server has forked are closed."""
        return not self.users and all(process.is_closed for process in self._processes)

    def start(self, command: list[str], **streams: int | None) -> Process:
        """Wait until the server is prepared, then fork a process.

        Args:
            command: a module and its arguments.
            streams: stdin, stdout and stderr. Each is subprocess.PIPE, subprocess.DEVNULL, a descriptor, or None for
                this process's own stream.

        Raises:
            EngineError: the process cannot be started.
        """
        number = next(self._numbers)
        try:
            with self._lock:
                # Wait before opening pipes. If another thread forked during the wait, its fork would keep them open.
                self.await_prepared()
                process = self._fork(number, command, streams)
                self._processes = [process, *(other for other in self._processes if not other.is_closed)]
                return process
        except BaseException:  # after an interrupt, for example, the caller does not get the process
            self._take_back(number)
            raise

    def await_prepared(self) -> None:
        """Wait until the server has imported the modules that ranks need. Raises EngineError if the imports fail."""
        with self._lock:
            if self._is_prepared and self.close.alive:
                return
            # MSG_PEEK leaves the first message in the socket, so an interrupt cannot lose it. `_ask` skips it.
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
        """Ask the server to fork a process and return its process id."""
        request = json.dumps([number, command]).encode()
        assert len(request) <= LONGEST_REQUEST_BYTES
        with suppress(ConnectionError):  # the server has ended; `_receive` reports it
            socket.send_fds(self._requests, [request], descriptors)
        answer = json.loads(self._receive(_ANSWER_S))
        while answer["number"] != number:  # the answer to an earlier request that was interrupted
            answer = json.loads(self._receive(_ANSWER_S))
        if "error" in answer:
            raise EngineError(f"ranks cannot start: {answer['error']}")
        return answer["process_id"]

    def _take_back(self, number: int) -> None:
        with suppress(OSError):  # the server has ended, and the processes that it has forked end too
            self._requests.send(json.dumps([number, []]).encode())

    def _receive(self, timeout_s: float, flags: int = 0) -> bytes:
        """Return the server's next message. Raises EngineError, and closes the server, if there is none."""
        failed = "ranks cannot start: the fork server"
        if not self.close.alive:
            raise EngineError(f"{failed} has ended")
        if not are_ready([self._requests], timeout_s):
            self.close()
            raise EngineError(f"{failed} has not answered for {timeout_s:.0f} s")
        found = b""
        with suppress(ConnectionError):
            found = self._requests.recv(LONGEST_REQUEST_BYTES, flags)
        if not found:
            status = self._server.wait()
            self.close()
            if status < 0:
                raise EngineError(f"{failed} was ended by {signal_name(-status)}")
            raise EngineError(f"{failed} failed with status {status}: the reason is printed above")
        return found


_servers: dict[tuple[object, ...], ForkServer] = {}
_lock = threading.RLock()


@contextmanager
def fork_server(environment: Mapping[str, str]) -> Iterator[ForkServer]:
    """Return a context manager for the fork server with this environment and this thread's user, cores and limits.

    The server keeps running until the `with` statement ends.
    """
    with _lock:
        server = server_for(environment)
        server.users += 1
    try:
        yield server
    finally:
        with _lock:
            server.users -= 1


def server_for(environment: Mapping[str, str]) -> ForkServer:
    """Return the same server as `fork_server`, but do not keep it running. It may end before you use it.

    If the server is not running, this function closes idle servers and then starts it.
    """
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
    """Return a context manager that converts OSError to EngineError."""
    try:
        yield
    except OSError as error:
        raise EngineError(f"ranks cannot start: {error}") from error


def inheritance(environment: Mapping[str, str]) -> tuple[object, ...]:
    """Return a key that selects a server. It contains everything that a process inherits from its parent and keeps."""
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
    """Return a descriptor of the current directory, which may have been removed or renamed."""
    try:
        return os.open(".", os.O_PATH)
    except PermissionError:  # this process now runs as a user who may not enter the current directory
        return os.open("/", os.O_PATH)


def _end(server: subprocess.Popen[bytes], requests: socket.socket) -> None:
    requests.close()  # the server ends when its socket is closed
    with suppress(PermissionError):  # this process now runs as another user
        server.kill()
    with suppress(subprocess.TimeoutExpired):
        server.wait(_END_S)


def _above_streams(requests: socket.socket) -> socket.socket:
    """Return the socket without a timeout. Its descriptor is above 2 even if a standard stream is closed."""
    with requests:
        above = socket.socket(fileno=fcntl.fcntl(requests, fcntl.F_DUPFD_CLOEXEC, 3))
    above.setblocking(True)
    return above


def _umask() -> list[str]:
    """Return the umask of this process. os.umask cannot be used, because it changes the umask for all threads."""
    return [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask")]


def _forget() -> None:
    """Forget the servers. This runs in a fork of this process, because the servers belong to the original process."""
    global _lock
    _lock = threading.RLock()
    for server in _servers.values():
        server.close.detach()
        server._server.returncode = 0  # otherwise subprocess would warn that the server still runs
        server._requests.close()
    _servers.clear()


os.register_at_fork(after_in_child=_forget)
