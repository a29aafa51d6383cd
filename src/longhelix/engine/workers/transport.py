"""The messages between engine and workers, and the sockets that carry them.

Messages are msgspec structs over ZeroMQ. The socket is a file in a directory that only this user can enter, so nothing
listens on the network. No message is ever executed as code.
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

# Messages of each socket that may queue at either end while the engine does not read. The number is small because old
# heartbeats are useless.
_UNREAD = 4


class Start(msgspec.Struct, tag=True, frozen=True):
    """Engine: load your shard of the model."""

    config: EngineConfig


class Execute(msgspec.Struct, tag=True, frozen=True):
    """Engine: execute a step."""

    step: Step


class CountRows(msgspec.Struct, tag=True, frozen=True):
    """Engine: report how many rows your experts have processed."""


class ReportPasses(msgspec.Struct, tag=True, frozen=True):
    """Engine: report what the sequence-parallel pass changed in your graphs."""


class SaveBlocks(msgspec.Struct, tag=True, frozen=True):
    """Engine: write your KV blocks of a part of a context to your file."""

    folder: str  # where the file is
    first: int  # index in the context of the first of `blocks`
    blocks: tuple[Block, ...]  # the part's blocks, of all ranks
    before: tuple[int, ...]  # for each KVP rank: its number of blocks before this part
    totals: tuple[int, ...]  # for each KVP rank: its number of blocks in the whole context


class LoadBlocks(msgspec.Struct, tag=True, frozen=True):
    """Engine: fill your KV blocks of a part of a context from files. No request reads these blocks yet."""

    folder: str  # where the files are
    files: tuple[SavedFile, ...]
    first: int  # index in the context of the first of `blocks`
    blocks: tuple[Block, ...]  # the blocks of this engine to fill, of all ranks


class TakeImageRows(msgspec.Struct, tag=True, frozen=True):
    """Engine: image states for some rows of a sequence's chunk in your next step only."""

    id: int  # of the sequence
    start: int  # place of the first row in the prompt
    # As in `compute.models.batch.ImageRows`: [layers, rows, hidden size], in the dtype of activations and this
    # machine's byte order.
    states: bytes


class TakeTokens(msgspec.Struct, tag=True, frozen=True):
    """Engine: the bytes of all tokens, which guides need. Sequences after this message may have guides."""

    table: TokenTable


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Engine: end your process."""


class Joined(msgspec.Struct, tag=True, frozen=True):
    """Worker: my process runs and waits for `Start`."""


class Alive(msgspec.Struct, tag=True, frozen=True):
    """Worker: my process runs, and this is the progress of its main thread.

    A separate thread sends it about every second, so only `progress` tells anything about the main thread.
    """

    progress: Progress


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """Worker: I have loaded more elements of the weights."""

    elements: int  # since the last message


class Warmed(msgspec.Struct, tag=True, frozen=True):
    """Worker: this fraction of my warm-up steps is done."""

    share: float  # from 0 to 1


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Worker: I am ready for steps, and this is how I run my layers."""

    execution: Execution


class Done(msgspec.Struct, tag=True, frozen=True):
    """Worker: a step's result; the stage's first rank adds the log-probabilities."""

    result: StepResult


class Traced(msgspec.Struct, tag=True, frozen=True):
    """Worker: the trace events of the step whose result I send next."""

    events: list[TraceEvent]


class RowCounts(msgspec.Struct, tag=True, frozen=True):
    """Worker: the number of rows that each of my experts has processed."""

    rows: list[list[int]]  # by layer and expert; empty for layers without experts


class PassReport(msgspec.Struct, tag=True, frozen=True):
    """Worker: what the pass has changed in my graphs so far, in the form of `longhelix.passes.report`."""

    patterns: dict[str, int]
    collectives: dict[str, dict[str, int]]
    bytes: dict[str, dict[str, int]]
    left_alone: list[str]


class Carried(msgspec.Struct, tag=True, frozen=True):
    """Worker: the answer to `SaveBlocks` and `LoadBlocks`."""

    refusal: str = ""  # why it failed; empty if it worked
    code: str = ""  # of the UserError


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Worker: I end because of an error."""

    cause: str
    lost_peer: bool  # a collective broke, so another rank failed first
    user_error_code: str  # the code of a UserError; empty for other causes


ToWorker = Start | Execute | CountRows | ReportPasses | SaveBlocks | LoadBlocks | TakeImageRows | TakeTokens | Stop
ToEngine = Joined | Alive | Loaded | Warmed | Ready | Done | Traced | RowCounts | PassReport | Carried | Failed

# Created once, because two threads that create decoders of one type at the same time crash (msgspec 0.22).
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
                raise EngineError(f"the engine's socket {path} cannot be opened: {error}") from error
            raise UserError(
                f"the temporary directory's path is too long for a socket ({path}): set TMPDIR to a shorter one"
            ) from error

    def send(self, ranks: Iterable[int], message: ToWorker) -> None:
        """Send one message to all `ranks`. A rank that is gone raises no error here; it is found by its silence."""
        payload = self._encoder.encode(message)
        for rank in ranks:
            try:
                self._socket.send_multipart((_identity(rank), payload))
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise

    def receive(self, timeout_s: float) -> tuple[int, ToEngine] | None:
        """Return the next rank and message, or None after `timeout_s` seconds."""
        if not self._socket.poll(math.ceil(timeout_s * 1000)):
            return None
        identity, payload = self._socket.recv_multipart()
        return int(identity.split(b"-")[1]), _TO_ENGINE.decode(payload)

    def close(self) -> None:
        """Close the socket. Messages that were not sent are dropped."""
        # Close the socket explicitly. If the garbage collector ends an engine, the context no longer knows the socket
        # and would wait for it.
        self._socket.close(linger=0)
        self._context.term()


class WorkerSocket:
    """A worker's end. A socket belongs to one thread, so the heartbeat thread has a separate one with its own role."""

    def __init__(self, directory: Path, rank: int, role: str = "main") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, _UNREAD)
        self._socket.setsockopt(zmq.IDENTITY, _identity(rank, role))
        self._socket.connect(f"ipc://{directory / 'engine'}")
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: ToEngine) -> None:
        """Send a message, and wait for room if the queue is full. An idle engine reads nothing."""
        self._socket.send(self._encoder.encode(message))

    def offer(self, message: ToEngine) -> None:
        """Send a message if there is room, else drop it."""
        with suppress(zmq.Again):
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def receive(self) -> ToWorker:
        """Wait for the next message and return it."""
        return _TO_WORKER.decode(self._socket.recv())

    def receive_waiting(self) -> list[ToWorker]:
        """Return the messages that have already arrived."""
        found: list[ToWorker] = []
        while self._socket.get(zmq.EVENTS) & zmq.POLLIN:  # ten times faster than `poll`
            found.append(self.receive())
        return found

    def close(self) -> None:
        """Close the socket. Messages in the queue have one second to be sent."""
        self._context.destroy()


def _identity(rank: int, role: str = "main") -> bytes:
    return f"rank-{rank}-{role}".encode()
