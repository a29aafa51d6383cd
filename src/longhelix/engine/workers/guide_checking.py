"""The process in which guides are compiled first: one that takes too much of it ends it alone."""

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

_CPU_S = 1.0  # of one guide
_MORE_BYTES = 1 << 29  # of memory, beside what it has at its start
# Of what the threads of ranks have, which then have some to spare.
_STACK_BYTES = 1 << 21
_LENGTH_BYTES = 4


class Checked(msgspec.Struct, frozen=True):
    """What was found of a guide: why it cannot be followed, with a UserError's code; or the CPU time that it took."""

    refusal: str = ""
    code: str = ""
    taken_s: float = 0.0


def main() -> None:
    """Serve the process that started this one, until it closes its end: first comes a vocabulary, then guides."""
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
    _write(answers, msgspec.msgpack.encode(Checked()))
    while (question := read(questions)) is not None:
        guide = msgspec.msgpack.decode(question, type=Guide)
        signal.setitimer(signal.ITIMER_PROF, _CPU_S)  # nobody handles its signal, which ends the process
        found = _check(matchers, dead_ends, guide)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answers, msgspec.msgpack.encode(found))


def _check(matchers: Matchers, dead_ends: DeadEnds, guide: Guide) -> Checked:
    begun_s = time.process_time()
    try:
        matchers.check(guide)
        taken_s = time.process_time() - begun_s
        dead_ends.check(guide)
    except UserError as error:
        return Checked(str(error), error.code)
    return Checked(taken_s=taken_s)


def _limit_memory() -> None:
    statm = Path("/proc/self/statm")
    if statm.exists():
        most = int(statm.read_text().split()[0]) * resource.getpagesize() + _MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def framed(message: bytes) -> bytes:
    """As `read` finds it."""
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message


def _write(stream: BinaryIO, message: bytes) -> None:
    stream.write(framed(message))
    stream.flush()


def read(stream: BinaryIO) -> bytes | None:
    """The next message, None at the end."""
    length = stream.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    message = stream.read(int.from_bytes(length, "little"))
    return message if len(message) == int.from_bytes(length, "little") else None


if __name__ == "__main__":
    main()
