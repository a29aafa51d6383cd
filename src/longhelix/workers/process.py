"""A process that ranks' programs run in, forked for this one, and what it gets from it."""

import os
import select
import signal
import subprocess
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import IO

_STATUS_S = 5.0  # from a process's end to its status, which the fork server tells
_STATUS_BYTES = 16


class Process:
    """A process that runs the `main` of a module and ends with the status that it returns.

    pid: its id, and that of its process group. stdin, stdout, stderr: our ends of those that were asked for as
    subprocess.PIPE, for text. is_orphan: the process that it was forked from, and with which it ends, ended first or
    stands still, and nobody knows its status.
    """

    def __init__(self, pid: int, report: IO[bytes], pipes: Mapping[str, IO[str]]) -> None:
        self.pid = pid
        self.stdin, self.stdout, self.stderr = (pipes.get(name) for name in ("stdin", "stdout", "stderr"))
        self.is_orphan = False
        self._report = report
        self._end = _end_of(pid)
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
        if _are_ready(self._ends(), timeout_s):
            with self._lock:
                if self._status is None:
                    told = _are_ready([self._report], _STATUS_S)
                    found = os.read(self._report.fileno(), _STATUS_BYTES) if told else b""
                    self.is_orphan = not found
                    self._status = int(found or 1)
        return self._status

    def close(self) -> None:
        """Close our ends of its pipes, once it has ended."""
        for pipe in (self.stdin, self.stdout, self.stderr, *self._ends()):
            if pipe is not None:
                pipe.close()

    def _ends(self) -> list[IO[bytes]]:
        """Those of which one can be read once it has ended."""
        return [self._report] if self._end is None else [self._report, self._end]


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


def signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def _are_ready(files: Iterable[IO[bytes]], timeout_s: float | None) -> bool:
    """Whether one of them can be read, or has ended, within `timeout_s`."""
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else 1000 * timeout_s))


def _end_of(pid: int) -> IO[bytes] | None:
    """What can be read once a process has ended; None if it has, or where the system does not say."""
    try:
        return open(os.pidfd_open(pid), "rb", buffering=0)
    except OSError:
        return None
