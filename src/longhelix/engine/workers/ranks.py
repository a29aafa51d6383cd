"""Starts the processes of ranks, watches them, and reliably ends them."""

import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from longhelix.engine.workers.environment import rank_environment
from longhelix.engine.workers.fork_server import fork_server, server_for
from longhelix.engine.workers.process import Process, signal_name
from longhelix.errors import EngineError, UserError

_POLL_S = 0.1
_GONE_S = 30.0
_ALONE_S = 5.0  # how long the other ranks may run after one has failed


def prepare() -> None:
    """Start importing the modules that ranks need. The imports run in the background, before the ranks are started."""
    server_for(rank_environment())


def await_prepared() -> None:
    """Wait for the imports that `prepare` started.

    Call this function before you create files. If this process is killed during the imports, nothing removes them.
    """
    with fork_server(rank_environment()) as server:
        server.await_prepared()


class Ranks:
    """Processes that run one module, one for each rank, and the directory with their sockets and shared files.

    `close` ends the processes and removes the directory. A `with` statement calls `close` at its end. The same happens
    when the process that started the ranks is gone (see `StartedRank`).

    Attributes:
        directory: the directory, which only this user can enter.
        processes: the processes by rank.
    """

    def __init__(self, directory: Path | None = None) -> None:
        """Create the directory, or take over an existing one."""
        self.directory = Path(tempfile.mkdtemp(prefix="longhelix-")) if directory is None else directory
        self.processes: dict[int, Process] = {}
        self._killed: set[int] = set()
        self._owner = os.getpid()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def process_ids(self) -> dict[int, int]:
        """The process id of each rank."""
        return {rank: process.pid for rank, process in self.processes.items()}

    def start(
        self,
        module: str,
        ranks: Iterable[int],
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int = 2,
        stderr: int | None = None,
    ) -> None:
        """Start each of `ranks` as a process that runs `main` of `module`.

        A process reads its rank with `StartedRank.from_command_line`. By default, it has no input, and its output goes
        to standard error.

        Args:
            module: name of the module.
            ranks: the ranks to start.
            arguments: arguments of the module.
            environment: variables in addition to those of `rank_environment`.
            stdin: see `ForkServer.start`.
            stdout: see `ForkServer.start`.
            stderr: see `ForkServer.start`.
        """
        with fork_server(rank_environment() | (environment or {})) as server:
            for rank in ranks:
                place = ["--rank", str(rank), "--directory", str(self.directory), "--parent", str(server.pid)]
                command = [module, *place, *arguments]
                self.processes[rank] = server.start(command, stdin=stdin, stdout=stdout, stderr=stderr)

    def statuses(self) -> dict[int, int]:
        """Return the exit statuses of the ranks that have ended.

        If a signal ended a rank, its status is the negative number of the signal.
        """
        # Find all ended processes first, because the time limit for a status starts when its process's end is noticed.
        ended = {rank: process for rank, process in self.processes.items() if process.await_end(0.0)}
        return {rank: status for rank, process in ended.items() if (status := process.wait()) is not None}

    def check_signals(self) -> None:
        """Raise EngineError if a signal ended a rank, except by `kill`, or if its exit status is unknown."""
        for rank, status in self.statuses().items():
            if rank in self._killed:
                continue
            if self.processes[rank].untold:
                raise EngineError(f"{self.describe(rank)} {self.processes[rank].untold}")
            if status < 0:
                raise EngineError(f"{self.describe(rank)} was ended by {signal_name(-status)}")

    def check_statuses(self) -> None:
        """Raise EngineError with rank and status if a rank ended with a status other than 0."""
        for rank, status in self.statuses().items():
            if status:
                raise EngineError(f"{self.describe(rank)} ended with status {status}")

    def describe(self, rank: int) -> str:
        """Return a rank's name for messages, such as `rank 3 (process 4711)`."""
        return f"rank {rank} (process {self.processes[rank].pid})"

    def watched(self, timeout_s: float) -> "RankWatch":
        """Return a context manager that watches the ranks, so its body may wait for them without a time limit.

        Start all ranks first. The time limit does not include their start, and another thread reads `processes`.
        """
        return RankWatch(self, timeout_s)

    def wait(self, timeout_s: float) -> None:
        """Wait at most `timeout_s` seconds for all ranks to end by themselves."""
        deadline_s = time.monotonic() + timeout_s
        for process in self.processes.values():
            process.await_end(deadline_s - time.monotonic())

    def kill(self) -> None:
        """End the running ranks and the processes that they have started, such as compilers.

        Returns when they have ended, or after 30 s. The system cannot end a process that is waiting for a device or a
        disk that does not answer.
        """
        for rank, process in self.processes.items():
            if not process.await_end(0.0):
                self._killed.add(rank)
                process.kill()
        self.wait(_GONE_S)
        self.statuses()  # the statuses may arrive a moment later

    def close(self) -> None:
        """End all ranks and remove the directory. If a call is interrupted, the next call completes the work."""
        if self._closed:
            return
        self.kill()
        for process in self.processes.values():
            process.close()
        if os.getpid() == self._owner:  # a fork of this process must not remove the directory
            shutil.rmtree(self.directory, ignore_errors=True)
        self._closed = True


class RankWatch:
    """Ends ranks that take too long, or that would wait forever for a rank that has failed.

    Attributes:
        error: why the watch ended the ranks. None while they run, or if they ended by themselves.
    """

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        self.error: EngineError | UserError | None = None
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        deadline_s, failed_s = time.monotonic() + self._timeout_s, 0.0
        while not self._over.wait(_POLL_S):
            try:
                self._ranks.check_signals()
                if any(self._ranks.statuses().values()):
                    # The other ranks usually notice the failure by themselves and report more details.
                    failed_s = failed_s or time.monotonic()
                    if time.monotonic() > failed_s + _ALONE_S:
                        self._ranks.check_statuses()
                if time.monotonic() > deadline_s:
                    raise EngineError(f"the ranks took longer than {self._timeout_s:.0f} s and were ended")
            except (EngineError, UserError) as error:
                self.error = error
                self._ranks.kill()
                return
