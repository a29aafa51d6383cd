"""Access to a process that the fork server has forked: its streams, its end and its exit status."""

import math
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import IO

_STATUS_S = 5.0  # longest time from a process's end until the fork server reports its status
_STATUS_BYTES = 16


class Process:
    """A process that runs the `main` of a module and ends with the status that `main` returns.

    Attributes:
        pid: its process id, which is also the id of its process group.
        stdin: our end of its standard input, in text mode, if it was started with subprocess.PIPE. Otherwise None.
        stdout: the same for its standard output.
        stderr: the same for its standard error.
        untold: why the exit status of the ended process is unknown. `wait` then returns 1. Empty if it is known.
        is_closed: whether `close` was called.
    """

    def __init__(
        self, pid: int, report: socket.socket, pipes: Mapping[str, IO[str]], take_back: Callable[[], None]
    ) -> None:
        """Args:
        pid: its process id.
        report: the socket on which its exit status arrives.
        pipes: our ends of its streams, by name.
        take_back: function that asks the fork server to end the process.
        """
        self.pid = pid
        self.stdin, self.stdout, self.stderr = (pipes.get(name) for name in ("stdin", "stdout", "stderr"))
        self.untold = ""
        self.is_closed = False
        self._report = report
        self._take_back = take_back
        self._end = _end_of(pid)
        self._ended_s: float | None = None  # when this object noticed the end
        self._status: int | None = None
        self._asker = os.getpid()

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs.

        If a signal ended the process, the status is the negative number of the signal.
        """
        return self.wait(0.0)

    def wait(self, timeout_s: float = math.inf) -> int | None:
        """Wait at most `timeout_s` seconds for the end of the process, and return the same as `poll`.

        In a fork of the process that created this object, the status is unknown and the method returns 0.
        """
        if self._status is None and self.await_end(timeout_s):
            self._status = self._told() if os.getpid() == self._asker else 0
        return self._status

    def await_end(self, timeout_s: float = math.inf) -> bool:
        """Wait at most `timeout_s` seconds for the end of the process, and return whether it has ended.

        The exit status may arrive a little later. To wait for several processes, call this method for each of them
        before you call `wait`.
        """
        if self._ended_s is None and (os.getpid() != self._asker or are_ready(self._ends(), timeout_s)):
            self._ended_s = time.monotonic()
        return self._ended_s is not None

    def kill(self) -> None:
        """End the process and the processes that it has started, such as compilers."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # the process has ended in the meantime
            pass
        except PermissionError:  # this process now runs as another user, but the fork server does not
            self._take_back()

    def close(self) -> None:
        """Close our ends of the pipes. Call this method after the process has ended."""
        for pipe in (self.stdin, self.stdout, self.stderr, *self._ends()):
            if pipe is not None:
                pipe.close()
        self.is_closed = True

    def _ends(self) -> list[IO[bytes] | socket.socket]:
        """Return files that show the end of the process. At least one of them becomes readable when it ends."""
        return [self._report] if self._end is None else [self._report, self._end]

    def _told(self) -> int:
        assert self._ended_s is not None
        is_told = are_ready([self._report], self._ended_s + _STATUS_S - time.monotonic())
        # MSG_PEEK leaves the status in the socket, so an interrupt cannot lose the status before it is stored.
        found = self._report.recv(_STATUS_BYTES, socket.MSG_PEEK) if is_told else b""
        if found:
            self.untold = ""
        elif is_told:
            self.untold = "ended because the fork server ended"
        else:
            self.untold = "ended with an unknown status: the fork server does not respond"
        return int(found or 1)


def stream(number: int, wanted: int | None) -> tuple[int, IO[str] | None]:
    """Open a standard stream for a new process.

    Args:
        number: 0, 1 or 2.
        wanted: subprocess.PIPE, subprocess.DEVNULL, a descriptor, or None for this process's own stream. A closed
            descriptor is replaced by /dev/null.

    Returns:
        A new descriptor for the process, and our end of the stream if it is a pipe.
    """
    if wanted == subprocess.PIPE:
        read, write = os.pipe()
        return (read, open(write, "w")) if number == 0 else (write, open(read))
    given = number if wanted is None else wanted
    return (os.dup(given) if is_open(given) else os.open(os.devnull, os.O_RDWR)), None


def is_open(descriptor: int) -> bool:
    """Return whether a descriptor of this process is open."""
    with suppress(OSError):
        os.fstat(descriptor)
        return True
    return False


def are_ready(files: Iterable[IO[bytes] | socket.socket], timeout_s: float) -> bool:
    """Return whether one of the files becomes readable, or reaches its end, within `timeout_s` seconds."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return bool(poll.poll(None if timeout_s == math.inf else 1000 * max(timeout_s, 0.0)))


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _end_of(pid: int) -> IO[bytes] | None:
    """Return a file that becomes readable when a process ends.

    Returns None if the process has already ended or the system has no pidfd.
    """
    try:
        return open(os.pidfd_open(pid), "rb", buffering=0)
    except OSError:
        return None
