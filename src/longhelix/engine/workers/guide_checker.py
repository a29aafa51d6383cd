"""Checks guides in a separate process before any rank compiles them."""

import hashlib
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from longhelix.engine.workers.guide_checking import CheckResult, framed, read
from longhelix.engine.workers.process import signal_name
from longhelix.errors import EngineError, PassingError, UserError
from longhelix.scheduler.guide import Guide, TokenTable

_START_S = 120.0
# Longest wait for an answer. The process limits its own CPU time, so this limit is for a process that gets no CPU time.
_ANSWER_S = 60.0
_KNOWN = 4096  # number of guides whose results are kept
_TRIES = 2  # attempts to compile a guide if other programs end the process
# Signals that other programs or the system send, for example when memory is short. The limits that the process sets for
# itself use other signals.
_OF_OTHERS = {signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM}


class GuideChecker:
    """Compiles guides in a separate process, which starts with the first guide. Any thread may use this object.

    Compiling a grammar of a few kilobytes can take minutes, use all memory, or overflow the stack. In a separate
    process, this harms neither ranks nor other requests.
    """

    def __init__(self, table: Callable[[], TokenTable]) -> None:
        """table: function that returns the vocabulary. It is called each time the process starts."""
        self._table = table
        self._process: subprocess.Popen[bytes] | None = None
        self._kill: Callable[[], object] = lambda: None  # also runs when this checker is garbage-collected
        self._found: dict[bytes, CheckResult] = {}  # results by digest of the guide, oldest first
        self._lock = threading.Lock()
        self._closed = False

    def check(self, guide: Guide) -> float:
        """Check a guide.

        Returns:
            Seconds of CPU time that it takes to compile the guide.

        Raises:
            UserError: no text can follow the guide, or the guide takes too much time or memory to compile.
            PassingError: the check could not be completed. It may succeed later.
        """
        found = self._found.get(_digest(guide))
        if found is None:
            with self._lock:
                found = self._asked(guide)
                if len(self._found) >= _KNOWN:
                    del self._found[next(iter(self._found))]
                self._found[_digest(guide)] = found
        return _taken_s(found)

    def knows(self, guide: Guide) -> bool:
        """Return whether the guide has already been accepted. This method does not wait for a check.

        Raises:
            UserError: the guide has already been rejected.
        """
        found = self._found.get(_digest(guide))
        if found is not None:
            _taken_s(found)
        return found is not None

    def close(self) -> None:
        """End the process. You may call this method more than once. Checks that are running on other threads fail."""
        self._closed = True
        self._kill()
        with self._lock:
            self._end()

    def _asked(self, guide: Guide) -> CheckResult:
        """Have the process check a guide. Raises PassingError if the check fails for a reason other than the guide."""
        ended_by = 0
        for _ in range(_TRIES):
            self._check_open()
            try:
                process = self._started()
                found = _exchange(process, msgspec.msgpack.encode(guide), _ANSWER_S)
            except BaseException:
                self._end()
                raise
            if found is not None:
                return found
            ended_by = -self._end()
            if ended_by not in _OF_OTHERS:
                self._check_open()
                return CheckResult(
                    "the guide takes too much time or memory to compile: make it simpler", "guide_too_large"
                )
        self._check_open()
        raise PassingError(
            f"guides cannot be checked now: {signal_name(ended_by)} ended the process that compiles them {_TRIES} "
            "times; try again later"
        )

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            table = msgspec.msgpack.encode(self._table())
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "longhelix.engine.workers.guide_checking"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # an interrupt from the terminal must not end this process
                )
            except OSError as error:
                raise PassingError(f"guides cannot be checked now ({error.strerror}): try again later") from error
            self._kill = weakref.finalize(self, self._process.kill)
            if self._closed:  # `close` ran in the meantime and could not end this process
                self._kill()
            if _exchange(self._process, table, _START_S) is None:
                self._check_open()
                raise PassingError(
                    "guides cannot be checked now: the process that compiles them does not start; try again later"
                )
        return self._process

    def _check_open(self) -> None:
        """Raise EngineError if the checker is closed."""
        if self._closed:
            raise EngineError("the engine has ended: make a new one")

    def _end(self) -> int:
        """End the process if there is one.

        Returns:
            The exit status, or the negative number of the signal that ended the process.
        """
        if self._process is None:
            return 0
        self._kill()
        self._process.communicate()
        status = self._process.wait()
        self._process = None
        return status


def _taken_s(found: CheckResult) -> float:
    """Return the CPU seconds that an accepted guide took. Raises UserError for a rejected guide."""
    if found.refusal:
        raise UserError(found.refusal, found.code)
    return found.taken_s


def _digest(guide: Guide) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(guide)).digest()


def _exchange(process: subprocess.Popen[bytes], message: bytes, timeout_s: float) -> CheckResult | None:
    """Send a message to the process and return its answer, or None if the process ends.

    Raises:
        PassingError: the process does not read or does not answer for `timeout_s` seconds.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    left = memoryview(framed(message))
    while left:
        _await(process, process.stdin, selectors.EVENT_WRITE, timeout_s)
        try:
            # A pipe that is ready accepts at least PIPE_BUF bytes without blocking.
            left = left[os.write(process.stdin.fileno(), left[: select.PIPE_BUF]) :]
        except OSError:
            return None
    _await(process, process.stdout, selectors.EVENT_READ, timeout_s)
    answer = read(process.stdout)
    return None if answer is None else msgspec.msgpack.decode(answer, type=CheckResult)


def _await(process: subprocess.Popen[bytes], pipe: IO[bytes], event: int, timeout_s: float) -> None:
    """Wait until a pipe to or from the process is ready or the process has ended.

    Raises:
        PassingError: neither happened within `timeout_s` seconds.
    """
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, event)
        if selector.select(timeout_s):
            return
    words = f"guides cannot be checked now: no answer within {timeout_s:g} s; try again later"
    if (spent := _core_s(process.pid)) is not None:
        had_s, waited_s = spent
        words += f" (the process that compiles them ran for {had_s:.1f} s and waited {waited_s:.1f} s for a core)"
    raise PassingError(words)


def _core_s(pid: int) -> tuple[float, float] | None:
    """Return how many seconds the threads of a process ran, and how many seconds they waited for a core.

    Linux counts these times in `schedstat` (Documentation/scheduler/sched-stats.rst). Returns None if the system does
    not count them.
    """
    try:
        counts = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    except OSError:  # a thread has just ended
        return None
    if not counts:
        return None
    had, waited = (sum(int(count[place]) for count in counts) for place in (0, 1))
    return had / 1e9, waited / 1e9
