"""What engine and workers say to each other, and the sockets that carry it.

msgspec messages over ZeroMQ, on a socket file in a directory that only this user can enter: nothing listens on the
network, and no message is ever code.
"""

import errno
import math
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from longhelix.compute.cache.saved_context import SavedFile
from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.execution import Execution
from longhelix.compute.runner.progress import Progress
from longhelix.compute.runner.trace import TraceEvent
from longhelix.errors import EngineError, UserError
from longhelix.scheduler.guide import TokenTable
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.step import Step, StepResult

# Messages that wait at either end for an engine that does not read, from each socket of a rank: few, because signs of
# life are stale by then.
_UNREAD = 4


class Start(msgspec.Struct, tag=True, frozen=True):
    """Engine: load your shard of the model."""

    config: EngineConfig


class Execute(msgspec.Struct, tag=True, frozen=True):
    """Engine: execute a step."""

    step: Step


class CountRows(msgspec.Struct, tag=True, frozen=True):
    """Engine: say how many rows your experts have had."""


class ReportPasses(msgspec.Struct, tag=True, frozen=True):
    """Engine: say what the sequence-parallel pass has made of your graphs."""


class SaveBlocks(msgspec.Struct, tag=True, frozen=True):
    """Engine: write those of a context's KV blocks that you keep to your file in `folder`.

    blocks: the context's, from the one with index `first` on. before, totals: how many of those before them, and of all
    of the context, each KVP rank keeps.
    """

    folder: str
    first: int
    blocks: tuple[Block, ...]
    before: tuple[int, ...]
    totals: tuple[int, ...]


class LoadBlocks(msgspec.Struct, tag=True, frozen=True):
    """Engine: fill those of a context's KV blocks that are yours from `files` in `folder`. Nobody reads them yet.

    blocks: what the context's become here, from the one with index `first` on.
    """

    folder: str
    files: tuple[SavedFile, ...]
    first: int
    blocks: tuple[Block, ...]


class TakeImageRows(msgspec.Struct, tag=True, frozen=True):
    """Engine: what fills some rows of a sequence's chunk in your next step, and in no other.

    start: the first row's place in the prompt. states: of `models.batch.ImageRows`, [layers, rows, hidden size], in the
    dtype of activations and this machine's byte order.
    """

    id: int
    start: int
    states: bytes


class TakeTokens(msgspec.Struct, tag=True, frozen=True):
    """Engine: sequences may have guides from now on, and this is what tokens stand for."""

    table: TokenTable


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Engine: end yourself."""


class Joined(msgspec.Struct, tag=True, frozen=True):
    """Worker: I am up and want to be told what to load."""


class Alive(msgspec.Struct, tag=True, frozen=True):
    """Worker: my process runs, and this is how far its main thread has come.

    A thread of its own sends it about every second, so only `progress` says anything about the main thread.
    """

    progress: Progress


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """Worker: so many more elements of the weights are loaded."""

    elements: int


class Warmed(msgspec.Struct, tag=True, frozen=True):
    """Worker: this share of my warm-up steps is done, from 0 to 1."""

    share: float


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Worker: I take steps now, and this is how I run my layers."""

    execution: Execution


class Done(msgspec.Struct, tag=True, frozen=True):
    """Worker: a step's result; the stage's first rank adds the log-probabilities."""

    result: StepResult


class Traced(msgspec.Struct, tag=True, frozen=True):
    """Worker: what I did in the step that I report next."""

    events: list[TraceEvent]


class RowCounts(msgspec.Struct, tag=True, frozen=True):
    """Worker: the rows that each of my experts has had, by layer; empty for layers without."""

    rows: list[list[int]]


class PassReport(msgspec.Struct, tag=True, frozen=True):
    """Worker: what the pass has made of my graphs so far, as `longhelix.passes.Report` has it."""

    patterns: dict[str, int]
    collectives: dict[str, dict[str, int]]
    bytes: dict[str, dict[str, int]]
    left_alone: list[str]


class Carried(msgspec.Struct, tag=True, frozen=True):
    """Worker: I have saved or loaded what I was asked to; or I have not, for a reason in words, with a UserError's
    code."""

    refusal: str = ""
    code: str = ""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Worker: I end because of `cause`. `lost_peer`: a collective broke, so another rank failed first.

    `user_error_code`: the code of a UserError, empty for other causes.
    """

    cause: str
    lost_peer: bool
    user_error_code: str


ToWorker = Start | Execute | CountRows | ReportPasses | SaveBlocks | LoadBlocks | TakeImageRows | TakeTokens | Stop
ToEngine = Joined | Alive | Loaded | Warmed | Ready | Done | Traced | RowCounts | PassReport | Carried | Failed

# Made here, because two threads that make decoders of one type at once crash (msgspec 0.22).
_TO_WORKER = msgspec.msgpack.Decoder(ToWorker)
_TO_ENGINE = msgspec.msgpack.Decoder(ToEngine)


class EngineSocket:
    """The engine's end: one socket to all ranks."""

    def __init__(self, directory: Path) -> None:
        self._context = zmq.Context()
        try:
            self._open(directory / "engine")
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._encoder = msgspec.msgpack.Encoder()

    def _open(self, path: Path) -> None:
        try:
            self._socket = self._context.socket(zmq.ROUTER)
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.SNDHWM, 0)  # a rank that has stopped reading must not block the engine
            self._socket.setsockopt(zmq.RCVHWM, _UNREAD)
            self._socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise EngineError(f"the engine's socket cannot be opened: {error}") from error
            raise UserError(
                f"the temporary directory's path is too long for a socket ({path}): set TMPDIR to a shorter one"
            ) from error

    def send(self, ranks: Iterable[int], message: ToWorker) -> None:
        """Give one message to all `ranks`. A rank that is gone shows by its silence in `receive`, not here."""
        payload = self._encoder.encode(message)
        for rank in ranks:
            try:
                self._socket.send_multipart((_identity(rank), payload))
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise

    def receive(self, timeout_s: float) -> tuple[int, ToEngine] | None:
        """The next (rank, message), or None after `timeout_s`."""
        if not self._socket.poll(math.ceil(timeout_s * 1000)):
            return None
        identity, payload = self._socket.recv_multipart()
        return int(identity.split(b"-")[1]), _TO_ENGINE.decode(payload)

    def close(self) -> None:
        # By name: when the garbage collector ends an engine, its context has lost sight of the socket, and would wait.
        self._socket.close(linger=0)
        self._context.term()


class WorkerSocket:
    """A worker's end. A socket belongs to one thread, so the heartbeat has one of its own, with a name of its own."""

    def __init__(self, directory: Path, rank: int, role: str = "main") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, _UNREAD)
        self._socket.setsockopt(zmq.IDENTITY, _identity(rank, role))
        self._socket.connect(f"ipc://{directory / 'engine'}")
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: ToEngine) -> None:
        """Send, once there is room; an idle engine reads nothing."""
        self._socket.send(self._encoder.encode(message))

    def offer(self, message: ToEngine) -> None:
        """Send if there is room, else drop the message."""
        with suppress(zmq.Again):
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def receive(self) -> ToWorker:
        return _TO_WORKER.decode(self._socket.recv())

    def receive_waiting(self) -> list[ToWorker]:
        """What has come already."""
        found: list[ToWorker] = []
        while self._socket.get(zmq.EVENTS) & zmq.POLLIN:  # in a tenth of a poll's time
            found.append(self.receive())
        return found

    def close(self) -> None:
        """Close, after giving what was sent a second to leave."""
        self._context.destroy()


def _identity(rank: int, role: str = "main") -> bytes:
    return f"rank-{rank}-{role}".encode()
