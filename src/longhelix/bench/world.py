"""The ranks of one benchmark: processes that are started with a job, tell what they measured, and surely end."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from longhelix.errors import EngineError, UserError
from longhelix.workers.environment import rank_environment

# The longest that one point may take; filling the KV of millions of tokens takes a minute.
POINT_TIMEOUT_S = 900.0
_POLL_S = 0.1

Row = dict[str, Any]


class World:
    """N processes of `longhelix.bench.rank` with the same job; use it in a `with` statement."""

    def __init__(self, job: msgspec.Struct, size: int, timeout_s: float = POINT_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._directory = tempfile.TemporaryDirectory(prefix="longhelix-bench-", ignore_cleanup_errors=True)
        self._processes: list[subprocess.Popen[str]] = []
        path = Path(self._directory.name)
        (path / "job.json").write_bytes(msgspec.json.encode(job))
        try:
            for rank in range(size):
                arguments = ["--rank", str(rank), "--directory", str(path), "--parent", str(os.getpid())]
                # -P: a rank imports nothing from the directory that the user happens to stand in.
                command = [sys.executable, "-P", "-m", "longhelix.bench.rank", *arguments]
                self._processes.append(
                    subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        text=True,
                        env=rank_environment(),
                    )
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def points(self) -> Iterator[list[Row]]:
        """What the ranks measured, point by point, in rank order. Raises UserError or EngineError if one fails."""
        while True:
            with _Watch(self._processes, self._timeout_s) as watch:
                lines = [process.stdout.readline() for process in self._processes]
                ended = not all(lines)
                statuses = [process.wait() for process in self._processes] if ended else []
            if watch.late:
                raise EngineError(f"the ranks took longer than {self._timeout_s:.0f} s for one point and were ended")
            rows = [json.loads(line) if line else {} for line in lines]
            _check(rows, [watch.found.get(rank, status) for rank, status in enumerate(statuses)])
            if ended:
                return
            yield rows

    def close(self) -> None:
        """End every process and remove the directory. May be called more than once."""
        for process in self._processes:
            process.kill()
            process.wait()
            process.stdout.close()
        self._directory.cleanup()


class _Watch:
    """Ends processes that take too long, or of which one was ended by a signal, for which others may wait forever.

    late: whether they took too long. found: if one was ended, the statuses of all at that moment, 0 for those that ran.
    """

    def __init__(self, processes: list[subprocess.Popen[str]], timeout_s: float) -> None:
        self.late = False
        self.found: dict[int, int] = {}
        self._processes = processes
        self._deadline_s = time.monotonic() + timeout_s
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
        while not self._over.wait(_POLL_S):
            self.late = time.monotonic() > self._deadline_s
            statuses = [process.poll() or 0 for process in self._processes]
            if self.late or min(statuses) < 0:
                self.found = dict(enumerate(statuses)) if min(statuses) < 0 else {}
                for process in self._processes:
                    process.kill()
                return


def collect(job: msgspec.Struct, size: int, on_point: Callable[[Row], None]) -> list[list[Row]]:
    """All points of a job; `on_point` is told rank 0's as they come."""
    points = []
    with World(job, size) as world:
        for rows in world.points():
            on_point(rows[0])
            points.append(rows)
    return points


def _check(rows: list[Row], statuses: list[int]) -> None:
    """Raise the first cause: a user's error, a process that was ended, a failure; last, a rank that lost a peer."""
    failures = [(rank, row) for rank, row in enumerate(rows) if "failed" in row]
    for _, row in failures:
        if row["user_error_code"]:
            raise UserError(row["failed"], row["user_error_code"])
    for rank, status in enumerate(statuses):
        if status < 0:
            raise EngineError(f"rank {rank} was ended by signal {-status}")
    for rank, row in sorted(failures, key=lambda failure: failure[1]["lost_peer"]):
        raise EngineError(f"rank {rank} failed: {row['failed']}")
    for rank, status in enumerate(statuses):
        if status:
            raise EngineError(f"rank {rank} ended with status {status}")
