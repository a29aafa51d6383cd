"""The ranks of one measurement: processes that are started with a job, tell what they measured, and surely end."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import msgspec

from longhelix.errors import EngineError, UserError
from longhelix.workers.ranks import Ranks

# The longest that one point may take; filling the KV of millions of tokens takes a minute.
POINT_TIMEOUT_S = 900.0

Row = dict[str, Any]


class Job(Protocol):
    """What every rank of a world measures: a msgspec.Struct at the top level of its module."""

    def measure(self, rank: int, directory: Path) -> Iterator[Row]:
        """One point after the other. `directory` is where the ranks meet."""


class World:
    """N processes of `longhelix.measure.rank` with the same job; use it in a `with` statement."""

    def __init__(self, job: Job, size: int, timeout_s: float = POINT_TIMEOUT_S) -> None:
        self._timeout_s = timeout_s
        self._ranks = Ranks()
        try:
            (self._ranks.directory / "job.json").write_bytes(msgspec.json.encode(job))
            place = f"{type(job).__module__}:{type(job).__name__}"
            self._ranks.start("longhelix.measure.rank", range(size), place, stdout=subprocess.PIPE)
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
    def process_ids(self) -> dict[int, int]:
        """Rank to process id."""
        return self._ranks.process_ids

    def points(self) -> Iterator[list[Row]]:
        """What the ranks measured, point by point, in rank order. Raises UserError or EngineError if one fails."""
        processes = self._ranks.processes.values()
        while True:
            with self._ranks.watched(self._timeout_s) as watch:
                lines = [process.stdout.readline() for process in processes]
                ended = not all(lines)
                if ended:
                    for process in processes:
                        process.wait()
            rows = [json.loads(line) if line else {} for line in lines]
            _check_user_errors(rows)
            _check_failures(rows, lost_peer=False)
            if watch.error is not None:
                raise watch.error
            if ended:
                self._ranks.check_signals()
            _check_failures(rows, lost_peer=True)
            if ended:
                self._ranks.check_statuses()
                return
            yield rows

    def close(self) -> None:
        """End every process and remove the directory. May be called more than once."""
        self._ranks.close()


def collect(job: Job, size: int, on_point: Callable[[Row], None]) -> list[list[Row]]:
    """All points of a job; `on_point` is told rank 0's as they come."""
    points = []
    with World(job, size) as world:
        for rows in world.points():
            on_point(rows[0])
            points.append(rows)
    return points


def _check_user_errors(rows: list[Row]) -> None:
    for row in rows:
        if row.get("user_error_code"):
            raise UserError(row["failed"], row["user_error_code"])


def _check_failures(rows: list[Row], lost_peer: bool) -> None:
    """Raise EngineError for the first rank that failed by itself, or that failed because another one had gone."""
    for rank, row in enumerate(rows):
        if "failed" in row and row["lost_peer"] == lost_peer:
            raise EngineError(f"rank {rank} failed: {row['failed']}")
