"""A process that ranks' programs run in, forked for this one, and what it gets from it."""

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

_STATUS_S = 5.0  # from a process's end to its status, which the fork server tells
_STATUS_BYTES = 16


class Process:
    """A process that runs the `main` of a module and ends with the status that it returns.

    pid: its id, and that of its process group. stdin, stdout, stderr: our ends of those that were asked for as
    subprocess.PIPE, for text. untold: once it has ended, why nobody knows its status, which is then 1; else empty.
    is_closed: whoever asked for it knows its end, and has no more use for it.
    """

    def __init__(
        self, pid: int, report: socket.socket, pipes: Mapping[str, IO[str]], take_back: Callable[[], None]
    ) -> None:
        """report: is told its status. take_back: has the process that it was forked from end it."""
        self.pid = pid
        self.stdin, self.stdout, self.stderr = (pipes.get(name) for name in ("stdin", "stdout", "stderr"))
        self.untold = ""
        self.is_closed = False
        self._report = report
        self._take_back = take_back
        self._end = _end_of(pid)
        self._ended_s: float | None = None  # when that was noticed
        self._status: int | None = None
        self._asker = os.getpid()

    def poll(self) -> int | None:
        """Its exit status, minus the signal's number if one ended it; None while it runs."""
        return self.wait(0.0)

    def wait(self, timeout_s: float = math.inf) -> int | None:
        """Wait until it has ended, for at most `timeout_s`; returns what `poll` does. A copy of the process that asked
        for it knows nothing of it, and is told 0."""
        if self._status is None and self.await_end(timeout_s):
            self._status = self._told() if os.getpid() == self._asker else 0
        return self._status

    def await_end(self, timeout_s: float = math.inf) -> bool:
        """Wait until it has ended, for at most `timeout_s`, and say whether it has. Its status may come a little later:
        whoever waits for several processes first awaits all their ends, and then waits once."""
        if self._ended_s is None and (os.getpid() != self._asker or are_ready(self._ends(), timeout_s)):
            self._ended_s = time.monotonic()
        return self._ended_s is not None

    def kill(self) -> None:
        """End it and what it has started, such as compilers."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has ended since
            pass
        except PermissionError:  # this process has another user by now, and the one that it was forked from has not
            self._take_back()

    def close(self) -> None:
        """Close our ends of its pipes, once it has ended."""
        for pipe in (self.stdin, self.stdout, self.stderr, *self._ends()):
            if pipe is not None:
                pipe.close()
        self.is_closed = True

    def _ends(self) -> list[IO[bytes] | socket.socket]:
        """Those of which one can be read once it has ended."""
        return [self._report] if self._end is None else [self._report, self._end]

    def _told(self) -> int:
        assert self._ended_s is not None
        is_told = are_ready([self._report], self._ended_s + _STATUS_S - time.monotonic())
        # It is left there to be read again: an interrupt before it is kept loses nothing.
        found = self._report.recv(_STATUS_BYTES, socket.MSG_PEEK) if is_told else b""
        if found:
            self.untold = ""
        elif is_told:
            self.untold = "ended because the process that ranks are forked from did"
        else:
            self.untold = "ended, and the process that ranks are forked from does not say how: it stands still"
        return int(found or 1)


def stream(number: int, wanted: int | None) -> tuple[int, IO[str] | None]:
    """What a process gets as its standard stream `number`, a new descriptor, and our end if that is a pipe.

    wanted: subprocess.PIPE, subprocess.DEVNULL, a descriptor, or None for this process's own; one that is closed reads
    and keeps nothing.
    """
    if wanted == subprocess.PIPE:
        read, write = os.pipe()
        return (read, open(write, "w")) if number == 0 else (write, open(read))
    given = number if wanted is None else wanted
    return (os.dup(given) if is_open(given) else os.open(os.devnull, os.O_RDWR)), None


def is_open(descriptor: int) -> bool:
    with suppress(OSError):
        os.fstat(descriptor)
        return True
    return False


def are_ready(files: Iterable[IO[bytes] | socket.socket], timeout_s: float) -> bool:
    """Whether one of them can be read, or has ended, within `timeout_s`."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return bool(poll.poll(None if timeout_s == math.inf else 1000 * max(timeout_s, 0.0)))


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _end_of(pid: int) -> IO[bytes] | None:
    """What can be read once a process has ended; None if it has, or where the system does not say."""
    try:
        return open(os.pidfd_open(pid), "rb", buffering=0)
    except OSError:
        return None
