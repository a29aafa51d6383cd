"""Guides, looked at before any rank has them."""

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

from longhelix.engine.workers.guide_checking import Checked, framed, read
from longhelix.engine.workers.process import signal_name
from longhelix.errors import EngineError, PassingError, UserError
from longhelix.scheduler.guide import Guide, TokenTable

_START_S = 120.0
_ANSWER_S = 60.0  # the process counts its own time; this is for one that does not get any
_KNOWN = 4096  # guides
_TRIES = 2  # to compile a guide while others end the process
# Signals with which others end it, such as a system that is short of memory; its limits have others.
_OF_OTHERS = {signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM}


class GuideChecker:
    """Compiles guides in a process of its own, which starts with the first of them: a grammar of a few kilobytes can
    take all memory, minutes, or more stack than there is, and ranks and clients shall not feel it. Any thread may ask.

    table: makes the vocabulary; it is called once.
    """

    def __init__(self, table: Callable[[], TokenTable]) -> None:
        self._table = table
        self._process: subprocess.Popen[bytes] | None = None
        self._kill: Callable[[], object] = lambda: None  # which nobody's holding this checker does as well
        self._found: dict[bytes, Checked] = {}  # by digests of guides, in the order in which they came
        self._lock = threading.Lock()
        self._closed = False

    def check(self, guide: Guide) -> float:
        """The seconds of CPU time that it takes to be compiled. Raises UserError if it cannot be followed, or takes too
        much of them; PassingError if nobody knows."""
        found = self._found.get(_digest(guide))
        if found is None:
            with self._lock:
                found = self._asked(guide)
                if len(self._found) >= _KNOWN:
                    del self._found[next(iter(self._found))]
                self._found[_digest(guide)] = found
        return _taken_s(found)

    def knows(self, guide: Guide) -> bool:
        """Whether it was looked at before, which nobody waits for. Raises the UserError that it was refused with."""
        found = self._found.get(_digest(guide))
        if found is not None:
            _taken_s(found)
        return found is not None

    def close(self) -> None:
        """End the process. May be called more than once, and beside a check, which then fails."""
        self._closed = True
        self._kill()
        with self._lock:
            self._end()

    def _asked(self, guide: Guide) -> Checked:
        """Raises PassingError if nothing is found, which is not the guide's doing."""
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
                return Checked(
                    "the guide takes too much time or memory to be compiled: make it simpler", "guide_too_large"
                )
        self._check_open()
        raise PassingError(f"guides cannot be checked: {signal_name(ended_by)} ends the process that compiles them")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            table = msgspec.msgpack.encode(self._table())
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "longhelix.engine.workers.guide_checking"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # an interrupt from the terminal is not for it
                )
            except OSError as error:
                raise PassingError(f"guides cannot be checked: {error.strerror}") from error
            self._kill = weakref.finalize(self, self._process.kill)
            if self._closed:  # since, by somebody who could not end it
                self._kill()
            if _exchange(self._process, table, _START_S) is None:
                self._check_open()
                raise PassingError("guides cannot be checked: the process that compiles them does not start")
        return self._process

    def _check_open(self) -> None:
        """Raise EngineError once it is closed."""
        if self._closed:
            raise EngineError("the engine has ended: make a new one")

    def _end(self) -> int:
        """End the process, if there is one, and return its exit status, minus the signal's number if one ended it."""
        if self._process is None:
            return 0
        self._kill()
        self._process.communicate()
        status = self._process.wait()
        self._process = None
        return status


def _taken_s(found: Checked) -> float:
    """Raises the UserError of what is refused."""
    if found.refusal:
        raise UserError(found.refusal, found.code)
    return found.taken_s


def _digest(guide: Guide) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(guide)).digest()


def _exchange(process: subprocess.Popen[bytes], message: bytes, timeout_s: float) -> Checked | None:
    """What the process answers; None if it ends. Raises PassingError if it takes nothing of the message, or says
    nothing, for so long."""
    assert process.stdin is not None
    assert process.stdout is not None
    left = memoryview(framed(message))
    while left:
        _await(process, process.stdin, selectors.EVENT_WRITE, timeout_s)
        try:
            # So much a pipe takes at once that takes anything.
            left = left[os.write(process.stdin.fileno(), left[: select.PIPE_BUF]) :]
        except OSError:
            return None
    _await(process, process.stdout, selectors.EVENT_READ, timeout_s)
    answer = read(process.stdout)
    return None if answer is None else msgspec.msgpack.decode(answer, type=Checked)


def _await(process: subprocess.Popen[bytes], pipe: IO[bytes], event: int, timeout_s: float) -> None:
    """Wait until a pipe to or from the process is ready, or the process has ended. Raises PassingError if neither is
    so within `timeout_s`."""
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, event)
        if selector.select(timeout_s):
            return
    words = f"guides cannot be checked: nothing was found within {timeout_s:g} s"
    if (spent := _core_s(process.pid)) is not None:
        had_s, waited_s = spent
        words += f"; their process has had a core for {had_s:.1f} s since it began, and waited {waited_s:.1f} s for one"
    raise PassingError(words)


def _core_s(pid: int) -> tuple[float, float] | None:
    """For how many seconds the threads of a process have had a core, and have waited for one, as Linux counts them
    (`schedstat`, Documentation/scheduler/sched-stats.rst); None where the system does not say."""
    try:
        counts = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    except OSError:  # a thread that has ended since
        return None
    if not counts:
        return None
    had, waited = (sum(int(count[place]) for count in counts) for place in (0, 1))
    return had / 1e9, waited / 1e9
