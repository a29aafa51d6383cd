"""The worker process of one rank. It executes the engine's messages in order and makes no decisions."""

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from longhelix.compute.cache.context_folder import disk_error
from longhelix.compute.kernels import TILES
from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.progress import Progress
from longhelix.compute.runner.rank import device_of, join, load_model, meet_at, new_pool, new_runner
from longhelix.compute.runner.runner import ModelRunner
from longhelix.compute.runner.saved_blocks import SavedBlocks
from longhelix.compute.runner.tracer import Tracer
from longhelix.compute.runner.warm_up import warm_up
from longhelix.engine.workers.failure import failure
from longhelix.engine.workers.started_rank import StartedRank
from longhelix.engine.workers.transport import (
    Alive,
    Carried,
    CountRows,
    Done,
    Execute,
    Hosting,
    Joined,
    LoadBlocks,
    Loaded,
    PassReport,
    Ready,
    ReportPasses,
    RowCounts,
    SaveBlocks,
    Start,
    Stop,
    TakeImageRows,
    TakeTokens,
    ToWorker,
    Traced,
    Warmed,
    WorkerSocket,
)
from longhelix.errors import UserError
from longhelix.spans import UNTRACED, Spans

HEARTBEAT_S = 1.0


def main() -> int:
    """Run a rank's process, which `Ranks` starts. Returns its exit status."""
    started = StartedRank.from_command_line()
    return serve(started.directory, started.rank)


def serve(directory: Path, rank: int) -> int:
    """Serve the engine with its sockets in `directory` until it sends `Stop`. Returns the process's exit status."""
    heart = _Heart(directory, rank)
    socket = WorkerSocket(directory, rank)
    try:
        _serve(socket, directory, rank, heart)
    except Exception as error:
        socket.send(failure(error))
        return 1
    finally:
        socket.close()
    return 0


def _serve(socket: WorkerSocket, directory: Path, rank: int, heart: "_Heart") -> None:
    socket.send(Joined())
    match socket.receive():
        case Start(config, meeting):
            tracer = Tracer(device_of(config, rank)) if config.execution.trace else None
            if meeting is not None:
                meet_at(config, rank, meeting, on_port=lambda port: socket.send(Hosting(port)))
            runner = _load(config, directory=directory, rank=rank, socket=socket, heart=heart, spans=tracer or UNTRACED)
        case _:
            return
    if tracer is not None:
        tracer.take()  # drops the spans of the warm-up
    saved = SavedBlocks.of(config, rank, runner.pool)
    socket.send(Ready(runner.execution))
    inbox, spans = _Inbox(socket, runner), tracer or UNTRACED
    while True:
        waiting = spans.begin("wait", "host")
        message = inbox.next()
        spans.end(waiting)
        match message:
            case Execute(step):
                result = runner.execute(step)
                if tracer is not None:
                    socket.send(Traced(tracer.take()))
                sending = spans.begin("send", "host")
                socket.send(Done(result))
                spans.end(sending)
            case CountRows():
                socket.send(RowCounts(runner.model.expert_rows()))
            case ReportPasses():
                socket.send(_pass_report())
            case TakeImageRows(id, start, states):
                runner.take_image_rows(id, start, states)
            case TakeTokens(table):
                runner.running.set_token_table(table)
            case SaveBlocks() | LoadBlocks() as message:
                socket.send(_carry(saved, message))
            case Stop():
                return


class _Inbox:
    """Queue of the engine's messages in order. It notifies the runner of a step as soon as its message arrives."""

    def __init__(self, socket: WorkerSocket, runner: ModelRunner) -> None:
        self._socket = socket
        self._runner = runner
        self._messages: deque[ToWorker] = deque()

    def next(self) -> ToWorker:
        messages = [] if self._messages else [self._socket.receive()]
        messages += self._socket.receive_waiting()
        for message in messages:
            if isinstance(message, Execute):
                self._runner.expect(message.step)
        self._messages += messages
        return self._messages.popleft()


def _pass_report() -> PassReport:
    from longhelix.passes import report  # imports the compiler; ranks that get this message already have it

    return PassReport(**report())


def _carry(saved: SavedBlocks, message: SaveBlocks | LoadBlocks) -> Carried:
    """Save or load KV blocks. A disk error or a bad file fails only this transfer."""
    try:
        match message:
            case SaveBlocks(folder, first, blocks, before, totals):
                saved.save(Path(folder), first=first, blocks=blocks, before=before, totals=totals)
            case LoadBlocks(folder, files, first, blocks):
                saved.load(Path(folder), files, first, blocks)
    except FileNotFoundError:
        refusal = UserError(
            f"the folder {message.folder} is missing on a host: set --contexts-dir to a folder that all hosts share",
            "disk_error",
        )
    except OSError as error:
        done = "written" if isinstance(message, SaveBlocks) else "read"
        refusal = disk_error(f"the KV blocks cannot be {done}", error)
    except torch.OutOfMemoryError:
        refusal = UserError(
            "there is not enough memory to copy KV blocks between ranks and files: free memory on the device and retry",
            "out_of_memory",
        )
    except UserError as error:
        refusal = error
    else:
        return Carried()
    return Carried(str(refusal), refusal.code)


def _load(
    config: EngineConfig, directory: Path, rank: int, socket: WorkerSocket, heart: "_Heart", spans: Spans
) -> ModelRunner:
    """Join the other ranks and load this rank's shard of the model. Warm up if new shapes may need a compiler."""
    mesh = join(config, rank, directory, spans)
    model = load_model(config, mesh, lambda elements: socket.send(Loaded(elements)), spans)
    pool = new_pool(config, rank, config.scheduler.num_blocks)
    runner = new_runner(config, mesh=mesh, model=model, pool=pool, spans=spans)
    if config.scheduler.placement.batch_invariant:
        _check_batch_invariant(runner)
    heart.progress = runner.progress
    if runner.execution.compiles:
        warm_up(config, runner, lambda share: socket.send(Warmed(share)))
    return runner


def _check_batch_invariant(runner: ModelRunner) -> None:
    """Raise UserError unless sums are computed in the same order in every batch.

    Packed kernels and shared memory keep the order. torch's matrix products and gloo do not.
    """
    pool = runner.pool
    if not runner.execution.capabilities.sums_in_rank_order:
        found = "these ranks do not share memory"
    elif not pool.packed:
        sizes = ", ".join(map(str, sorted({each.key_size for each in pool.formats if each.arrangement is not TILES})))
        found = f"KV blocks of {pool.block_tokens} tokens with heads of size {sizes} cannot be packed"
    elif not runner.execution.capabilities.packed:
        found = "the model has matrix products with an input size that is not a multiple of 16"
    else:
        return
    raise UserError(
        "--batch-invariant needs the native CPU kernels, ranks that share memory, and KV blocks, heads and products in "
        f"multiples of 16, but {found}: "
        "leave --batch-invariant out, or choose a layout, model and block size that fit"
    )


class _Heart:
    """Thread that regularly tells the engine that this process is alive and what progress it has made."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.progress: Callable[[], Progress] = Progress
        threading.Thread(target=self._beat, args=(directory, rank), daemon=True).start()

    def _beat(self, directory: Path, rank: int) -> None:
        socket = WorkerSocket(directory, rank, role="heartbeat")
        while True:
            socket.offer(Alive(self.progress()))
            time.sleep(HEARTBEAT_S)
