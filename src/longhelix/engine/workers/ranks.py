"""The processes of ranks, as the process that starts them sees them: it starts, watches and reliably ends them."""

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
from longhelix.errors import EngineError

_POLL_S = 0.1
_GONE_S = 30.0
_ALONE_S = 5.0  # that ranks run on after one of them has failed


def prepare() -> None:
    """Begin to import what ranks need, beside what this process does until it starts them."""
    server_for(rank_environment())


def await_prepared() -> None:
    """Wait until that is imported: what is made before would stay if this process were killed meanwhile."""
    with fork_server(rank_environment()) as server:
        server.await_prepared()


class Ranks:
    """Processes that run one module, a rank each, and the directory in which they meet.

    directory: only this user can enter it. processes: by rank. Both are gone after `close`, which a `with` statement
    calls, and also when the process that started the ranks is gone (`StartedRank`).
    """

    def __init__(self, directory: Path | None = None) -> None:
        """Make the directory, or take over one that was made for these ranks."""
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
        """Rank to process id."""
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
        """Start each of `ranks` as a process that runs `main` of `module`, which finds itself by
        `StartedRank.from_command_line`.

        arguments: of the module. environment: variables beside those of `rank_environment`. Ranks read nothing and
        print to standard error, unless `stdin`, `stdout` or `stderr` (as `ForkServer.start` has them) say otherwise.
        """
        with fork_server(rank_environment() | (environment or {})) as server:
            for rank in ranks:
                place = ["--rank", str(rank), "--directory", str(self.directory), "--parent", str(server.pid)]
                command = [module, *place, *arguments]
                self.processes[rank] = server.start(command, stdin=stdin, stdout=stdout, stderr=stderr)

    def statuses(self) -> dict[int, int]:
        """Exit statuses of the ranks that have ended; minus the number of the signal where a signal ended a rank."""
        # All that have ended are noticed first: a status is waited for from then on.
        ended = {rank: process for rank, process in self.processes.items() if process.await_end(0.0)}
        return {rank: status for rank, process in ended.items() if (status := process.wait()) is not None}

    def check_signals(self) -> None:
        """Raise EngineError with the rank and the signal if a signal has ended a rank, other than by `kill`, or if
        nobody knows how it ended."""
        for rank, status in self.statuses().items():
            if rank in self._killed:
                continue
            if self.processes[rank].untold:
                raise EngineError(f"{self.describe(rank)} {self.processes[rank].untold}")
            if status < 0:
                raise EngineError(f"{self.describe(rank)} was ended by {signal_name(-status)}")

    def check_statuses(self) -> None:
        """Raise EngineError, which names rank and status, if a rank has ended with another one than 0."""
        for rank, status in self.statuses().items():
            if status:
                raise EngineError(f"{self.describe(rank)} ended with status {status}")

    def describe(self, rank: int) -> str:
        """`rank 3 (process 4711)`."""
        return f"rank {rank} (process {self.processes[rank].pid})"

    def watched(self, timeout_s: float) -> "RankWatch":
        """Watch the ranks in a `with` statement, so that its body may wait for them without a time limit of its own.
        All of them are started by now: their start is no part of the time, and the watch looks at them from a thread.
        """
        return RankWatch(self, timeout_s)

    def wait(self, timeout_s: float) -> None:
        """Wait until all ranks have ended by themselves, for at most `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        for process in self.processes.values():
            process.await_end(deadline_s - time.monotonic())

    def kill(self) -> None:
        """End the ranks that run and what they have started, such as compilers; return once they are gone, or after a
        while in which the system could not end one: it waits for a device or a disk that does not answer."""
        for rank, process in self.processes.items():
            if not process.await_end(0.0):
                self._killed.add(rank)
                process.kill()
        self.wait(_GONE_S)
        self.statuses()  # which may take a moment more, for all of them together

    def close(self) -> None:
        """End all ranks and remove the directory. An interrupted call is completed by the next one."""
        if self._closed:
            return
        self.kill()
        for process in self.processes.values():
            process.close()
        if os.getpid() == self._owner:  # a copy of the process that started them leaves them alone
            shutil.rmtree(self.directory, ignore_errors=True)
        self._closed = True


class RankWatch:
    """Ends ranks that take too long, and ranks of which one has gone, by a signal or with an error: the others might
    wait for it forever.

    error: why the ranks were ended; None while they run, and if they ended by themselves.
    """

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        self.error: EngineError | None = None
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
                    # The others mostly notice by themselves, and say more.
                    failed_s = failed_s or time.monotonic()
                    if time.monotonic() > failed_s + _ALONE_S:
                        self._ranks.check_statuses()
                if time.monotonic() > deadline_s:
                    raise EngineError(f"the ranks took longer than {self._timeout_s:.0f} s and were ended")
            except EngineError as error:
                self.error = error
                self._ranks.kill()
                return
