"""The ranks of one measurement: processes that are started with a job, tell what they measured, and surely end."""

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import msgspec

from longhelix.engine.workers.ranks import Ranks
from longhelix.engine.workers.transport import Failed
from longhelix.errors import EngineError, UserError

# The longest that one point may take; filling the KV of millions of tokens takes a minute.
POINT_TIMEOUT_S = 900.0

Row = dict[str, Any]


class Job(Protocol):
    """What every rank of a world measures: a msgspec.Struct at the top level of its module."""

    def measure(self, rank: int, directory: Path) -> Iterator[Row]:
        """One point after the other. `directory` is where the ranks meet."""


class World(Ranks):
    """N processes of `longhelix.measure.rank` with the same job; use it in a `with` statement."""

    def __init__(self, job: Job, size: int, timeout_s: float = POINT_TIMEOUT_S) -> None:
        super().__init__()
        self._timeout_s = timeout_s
        try:
            (self.directory / "job.json").write_bytes(msgspec.json.encode(job))
            place = f"{type(job).__module__}:{type(job).__name__}"
            self.start("longhelix.measure.rank", range(size), place, stdout=subprocess.PIPE)
        except BaseException:
            self.close()
            raise

    def points(self) -> Iterator[list[Row]]:
        """What the ranks measured, point by point, in rank order. Raises UserError or EngineError if one fails."""
        while True:
            with self.watched(self._timeout_s) as watch:
                lines = [process.stdout.readline() for process in self.processes.values()]
                ended = not all(lines)
                if ended:
                    for process in self.processes.values():
                        process.wait()
            rows = [json.loads(line) if line else {} for line in lines]
            self._check_failures(rows, watch.error)
            if ended:
                self.check_statuses()
                return
            yield rows

    def _check_failures(self, rows: list[Row], watched: EngineError | None) -> None:
        """Raise the first cause, if ranks failed: what another rank's end brings about comes last."""
        failed = {rank: msgspec.convert(row["failed"], Failed) for rank, row in enumerate(rows) if "failed" in row}
        for failure in failed.values():
            if failure.user_error_code:
                raise UserError(failure.cause, failure.user_error_code)
        self.check_signals()
        for lost_peer in (False, True):
            for rank, failure in failed.items():
                if failure.lost_peer == lost_peer:
                    raise EngineError(f"rank {rank} failed: {failure.cause}")
            if watched is not None:
                raise watched


def collect(
    job: Job, size: int, on_point: Callable[[Row], None], timeout_s: float = POINT_TIMEOUT_S
) -> list[list[Row]]:
    """All points of a job; `on_point` is told rank 0's as they come."""
    points = []
    with World(job, size, timeout_s) as world:
        for rows in world.points():
            on_point(rows[0])
            points.append(rows)
    return points
