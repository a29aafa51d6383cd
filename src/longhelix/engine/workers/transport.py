"""The messages between the engine and its workers, and the sockets that transport them.

Messages are msgspec structs over ZeroMQ. The socket is a file in a directory that only this user can enter, so nothing
listens on the network. No message is ever executed as code.
"""

import errno
import math
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq

from longhelix.compute.cache.saved_context import SavedFile
from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.execution import Execution
from longhelix.compute.runner.meeting import Meeting
from longhelix.compute.runner.progress import Progress
from longhelix.compute.runner.trace import TraceEvent
from longhelix.errors import EngineError, UserError
from longhelix.scheduler.guide import TokenTable
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.step import Step, StepResult

# Number of messages that each socket may queue at either end while the engine does not read. The number is small
# because old heartbeats are useless.
_UNREAD = 4


class Start(msgspec.Struct, tag=True, frozen=True):
    """Tells a worker to load its shard of the model."""

    config: EngineConfig
    meeting: Meeting | None = None  # None if all ranks are on one host


class Execute(msgspec.Struct, tag=True, frozen=True):
    """Tells a worker to execute a step."""

    step: Step


class CountRows(msgspec.Struct, tag=True, frozen=True):
    """Asks a worker how many rows its experts have processed."""


class ReportPasses(msgspec.Struct, tag=True, frozen=True):
    """Asks a worker what the sequence-parallel pass has changed in its graphs."""


class SaveBlocks(msgspec.Struct, tag=True, frozen=True):
    """Tells a worker to write its KV blocks of one part of a context to its file."""

    folder: str  # folder of the file
    first: int  # index of the first of `blocks` in the context
    blocks: tuple[Block, ...]  # blocks of this part on all ranks, in the form of `Step`
    before: tuple[tuple[int, ...], ...]  # number of blocks before this part, by KV group and KVP rank
    totals: tuple[tuple[int, ...], ...]  # number of blocks in the whole context, by KV group and KVP rank


class LoadBlocks(msgspec.Struct, tag=True, frozen=True):
    """Tells a worker to fill its KV blocks of one part of a context from files. No request reads these blocks yet."""

    folder: str  # folder of the files
    files: tuple[SavedFile, ...]
    first: int  # index of the first of `blocks` in the context
    blocks: tuple[Block, ...]  # blocks to fill on all ranks of this engine, in the form of `Step`


class TakeImageRows(msgspec.Struct, tag=True, frozen=True):
    """Sends a worker the image states for some rows of a sequence's chunk. They are valid for the next step only."""

    id: int  # id of the sequence
    start: int  # position of the first row in the prompt
    # In the form of `compute.models.batch.ImageRows`: [layers, rows, hidden size], in the dtype of activations and in
    # this machine's byte order.
    states: bytes


class TakeTokens(msgspec.Struct, tag=True, frozen=True):
    """Sends a worker the bytes of all tokens, which guides need. Sequences after this message may have guides."""

    table: TokenTable


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Tells a worker to end its process."""


class Joined(msgspec.Struct, tag=True, frozen=True):
    """Tells the engine that a worker's process is running and waits for `Start`."""


class Hosting(msgspec.Struct, tag=True, frozen=True):
    """Tells the engine the port on which rank 0 waits for the other ranks."""

    port: int


class Alive(msgspec.Struct, tag=True, frozen=True):
    """Tells the engine that a worker's process is running, and the progress of its main thread.

    A separate thread sends this message about every second, so only `progress` describes the state of the main thread.
    """

    progress: Progress


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """Tells the engine that a worker has loaded more elements of the weights."""

    elements: int  # number of elements since the last message


class Warmed(msgspec.Struct, tag=True, frozen=True):
    """Tells the engine which fraction of its warm-up steps a worker has completed."""

    share: float  # fraction from 0 to 1


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Tells the engine that a worker is ready for steps, and how the worker runs its layers."""

    execution: Execution


class Done(msgspec.Struct, tag=True, frozen=True):
    """Sends the engine the result of a step. The stage's first rank adds the log-probabilities."""

    result: StepResult


class Traced(msgspec.Struct, tag=True, frozen=True):
    """Sends the engine the trace events of the step whose result the worker sends next."""

    events: list[TraceEvent]


class RowCounts(msgspec.Struct, tag=True, frozen=True):
    """Sends the engine the number of rows that each of a worker's experts has processed."""

    rows: list[list[int]]  # by layer and expert; empty for layers without experts


class PassReport(msgspec.Struct, tag=True, frozen=True):
    """Tells the engine what the pass has changed in a worker's graphs, in the form of `longhelix.passes.report`."""

    patterns: dict[str, int]
    collectives: dict[str, dict[str, int]]
    bytes: dict[str, dict[str, int]]
    left_alone: list[str]


class Carried(msgspec.Struct, tag=True, frozen=True):
    """A worker's answer to `SaveBlocks` and `LoadBlocks`."""

    refusal: str = ""  # why saving or loading failed; empty if it succeeded
    code: str = ""  # code of the UserError


class Failed(msgspec.Struct, tag=True, frozen=True):
    """Tells the engine that a worker ends because of an error."""

    cause: str
    lost_peer: bool  # True if a collective failed because another rank had failed first
    user_error_code: str  # the code of a UserError; empty for other causes


ToWorker = Start | Execute | CountRows | ReportPasses | SaveBlocks | LoadBlocks | TakeImageRows | TakeTokens | Stop
ToEngine = (
    Joined | Hosting | Alive | Loaded | Warmed | Ready | Done | Traced | RowCounts | PassReport | Carried | Failed
)

# Created once, because two threads that create decoders of one type at the same time crash (msgspec 0.22).
_TO_WORKER = msgspec.msgpack.Decoder(ToWorker)
_TO_ENGINE = msgspec.msgpack.Decoder(ToEngine)


class EngineSocket:
    """The engine's end of the connection. It is one socket for all ranks."""

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
            self.socket = self._context.socket(zmq.ROUTER)
            self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self.socket.setsockopt(zmq.SNDHWM, 0)  # a rank that has stopped reading must not block the engine
            self.socket.setsockopt(zmq.RCVHWM, _UNREAD)
            self.socket.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise EngineError(f"the engine's socket {path} cannot be opened: {error}") from error
            raise UserError(
                f"the temporary directory's path is too long for a socket ({path}): set TMPDIR to a shorter one"
            ) from error

    def send(self, ranks: Iterable[int], message: ToWorker) -> None:
        """Send one message to all `ranks`.

        This method raises no error for a rank that has ended. The pool finds such a rank because it is silent.
        """
        self.forward(ranks, self._encoder.encode(message))

    def start(self, ranks: Collection[int], message: Start) -> None:
        """Send `ranks` their first message."""
        self.send(ranks, message)

    def forward(self, ranks: Iterable[int], payload: bytes) -> None:
        """Send an encoded message to all `ranks`."""
        for rank in ranks:
            try:
                self.socket.send_multipart((_identity(rank), payload))
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise

    def receive(self, timeout_s: float) -> tuple[int, ToEngine] | None:
        """Return the next message with the rank that sent it, or None after `timeout_s` seconds."""
        found = self.receive_frames(timeout_s)
        return None if found is None else decoded(*found)

    def receive_frames(self, timeout_s: float) -> tuple[bytes, bytes] | None:
        """Return the next message as it came: the sender's identity, and the encoded message."""
        if not self.socket.poll(math.ceil(timeout_s * 1000)):
            return None
        identity, payload = self.socket.recv_multipart()
        return identity, payload

    def close(self) -> None:
        """Close the socket. Messages that were not sent are dropped."""
        # Close the socket explicitly. If the garbage collector frees an engine, the ZeroMQ context no longer knows the
        # socket and would wait for it.
        self.socket.close(linger=0)
        self._context.term()


def decoded(identity: bytes, payload: bytes) -> tuple[int, ToEngine]:
    """Return the rank with this identity, and the message that it has sent."""
    return int(identity.split(b"-")[1]), _TO_ENGINE.decode(payload)


def is_heartbeat(identity: bytes) -> bool:
    """Whether this is the identity of a socket that sends only `Alive`."""
    return identity.endswith(b"-heartbeat")


def with_place(payload: bytes, model_path: str, interface: str) -> bytes:
    """Return an encoded `Start` for the ranks of another host, with that host's own model path and interface."""
    start = _TO_WORKER.decode(payload)
    assert isinstance(start, Start)
    meeting = msgspec.structs.replace(start.meeting, interface=interface)
    config = replace(start.config, model_path=model_path)
    return msgspec.msgpack.encode(Start(config, meeting))


class WorkerSocket:
    """A worker's end of the connection.

    Only one thread may use a socket, so the heartbeat thread has a separate socket with its own role.
    """

    def __init__(self, directory: Path, rank: int, role: str = "main") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, _UNREAD)
        self._socket.setsockopt(zmq.IDENTITY, _identity(rank, role))
        self._socket.connect(f"ipc://{directory / 'engine'}")
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: ToEngine) -> None:
        """Send a message. If the queue is full, wait for room. An idle engine reads no messages."""
        self._socket.send(self._encoder.encode(message))

    def offer(self, message: ToEngine) -> None:
        """Send a message if the queue has room. Otherwise drop it."""
        with suppress(zmq.Again):
            self._socket.send(self._encoder.encode(message), zmq.NOBLOCK)

    def receive(self) -> ToWorker:
        """Wait for the next message and return it."""
        return _TO_WORKER.decode(self._socket.recv())

    def receive_waiting(self) -> list[ToWorker]:
        """Return the messages that have already arrived."""
        found: list[ToWorker] = []
        while self._socket.get(zmq.EVENTS) & zmq.POLLIN:  # this check is ten times faster than `poll`
            found.append(self.receive())
        return found

    def close(self) -> None:
        """Close the socket. It sends queued messages for at most one second before it closes."""
        self._context.destroy()


def _identity(rank: int, role: str = "main") -> bytes:
    return f"rank-{rank}-{role}".encode()
