"""The process that compiles guides before the ranks do.

If a guide takes too much time or memory, only this process ends.
"""

import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from longhelix.compute.runner.dead_ends import DeadEnds
from longhelix.compute.runner.matchers import Matchers
from longhelix.errors import UserError
from longhelix.scheduler.guide import Guide, TokenTable

_CPU_S = 1.0  # limit on the CPU time for one guide
_MORE_BYTES = 1 << 29  # limit on the memory that guides use in addition to the memory after the start
# Smaller than the stacks of the ranks' threads, so a guide that compiles here also compiles in the ranks.
_STACK_BYTES = 1 << 21
_LENGTH_BYTES = 4


class CheckResult(msgspec.Struct, frozen=True):
    """Result of checking one guide."""

    refusal: str = ""  # why the guide cannot be used; empty if it was accepted
    code: str = ""  # code of the UserError
    taken_s: float = 0.0  # CPU seconds that compilation took


def main() -> None:
    """Read a vocabulary and then guides from standard input. Write a result for each guide until the input ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    serving = threading.Thread(target=_serve, args=(sys.stdin.buffer, sys.stdout.buffer))
    serving.start()
    serving.join()


def _serve(questions: BinaryIO, answers: BinaryIO) -> None:
    table = read(questions)
    if table is None:
        return
    words = msgspec.msgpack.decode(table, type=TokenTable)
    matchers, dead_ends = Matchers(words), DeadEnds(words)
    _limit_memory()
    _write(answers, msgspec.msgpack.encode(CheckResult()))
    while (question := read(questions)) is not None:
        guide = msgspec.msgpack.decode(question, type=Guide)
        signal.setitimer(signal.ITIMER_PROF, _CPU_S)  # the timer's signal has no handler, so it ends the process
        found = _check(matchers, dead_ends, guide)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answers, msgspec.msgpack.encode(found))


def _check(matchers: Matchers, dead_ends: DeadEnds, guide: Guide) -> CheckResult:
    start_s = time.process_time()
    try:
        matchers.check(guide)
        taken_s = time.process_time() - start_s
        dead_ends.check(guide)
    except UserError as error:
        return CheckResult(str(error), error.code)
    return CheckResult(taken_s=taken_s)


def _limit_memory() -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():
        most = int(statm.read_text().split()[0]) * resource.getpagesize() + _MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def framed(message: bytes) -> bytes:
    """Return a message that is preceded by its length, as `read` expects."""
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message


def _write(stream: BinaryIO, message: bytes) -> None:
    stream.write(framed(message))
    stream.flush()


def read(stream: BinaryIO) -> bytes | None:
    """Return the next message, or None at the end of the stream."""
    length = stream.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    message = stream.read(int.from_bytes(length, "little"))
    return message if len(message) == int.from_bytes(length, "little") else None


if __name__ == "__main__":
    main()
