"""Runs one measurement: starts rank processes with a job, collects their rows, and ends the processes.

With several hosts, each of them runs the measurement and starts its own ranks. Host 0 collects the rows of all ranks.
"""

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import msgspec

from longhelix.engine.workers.ranks import Ranks
from longhelix.engine.workers.transport import Failed
from longhelix.errors import EngineError, UserError
from longhelix.measure.hosts import MeasuringHosts

# Time limit for one point. Filling the KV of millions of tokens alone takes a minute.
POINT_TIMEOUT_S = 900.0
_LAST_WORDS_S = 2.0  # how long a failed rank of another host may take to say why

Row = dict[str, Any]


class RankJob(Protocol):
    """Measurement that every rank of a world runs. A job must be a msgspec.Struct at the top level of its module."""

    def measure(self, rank: int, directory: Path) -> Iterator[Row]:
        """Yield a row for each point.

        Args:
            rank: this rank.
            directory: directory that all ranks of this host share.
        """


class World(Ranks):
    """Rank processes (`longhelix.measure.rank`) that run the same job. Use a world in a `with` statement.

    A world of one rank runs on each host by itself.
    """

    def __init__(
        self, job: RankJob, size: int, timeout_s: float = POINT_TIMEOUT_S, hosts: MeasuringHosts | None = None
    ) -> None:
        super().__init__()
        self._timeout_s, self._hosts = timeout_s, hosts
        own: Sequence[int] = range(size)
        self._remote: Sequence[int] = ()  # ranks on other hosts whose rows this host collects
        try:
            if hosts is not None and size > 1:
                own = hosts.hosts(size).ranks[hosts.node_rank]
                self._remote = range(len(own), size) if hosts.node_rank == 0 else ()
            encoded = msgspec.json.encode(job)
            if hosts is not None:
                encoded = hosts.begin_world(self.directory, encoded, is_shared=size > 1)
            (self.directory / "job.json").write_bytes(encoded)
            place = f"{type(job).__module__}:{type(job).__name__}"
            self.start("longhelix.measure.rank", own, place, stdout=subprocess.PIPE)
        except BaseException:
            self.close()
            raise

    def check_signals(self) -> None:
        """Raise EngineError or UserError if a signal ended a rank, or if another host is gone or has failed."""
        super().check_signals()
        if self._hosts is not None:
            self._hosts.check_others()

    def points(self) -> Iterator[list[Row]]:
        """Yield the rows of all ranks for each point, in rank order. Raises UserError or EngineError on failure.

        Hosts other than the first yield the rows of their own ranks.
        """
        for point in count():
            with self.watched(self._timeout_s) as watch:
                lines = [process.stdout.readline() for process in self.processes.values()]
                ended = not all(lines)
                if ended:
                    for process in self.processes.values():
                        process.wait()
            rows = {rank: json.loads(line) if line else {} for rank, line in zip(self.processes, lines, strict=True)}
            if ended:
                if self._hosts is not None and any("failed" in row for row in rows.values()):
                    rows |= self._hosts.last_rows(self._remote, point, _LAST_WORDS_S)
                self._check_failures(rows, watch.error)
                self.check_statuses()
                return
            if self._hosts is not None:
                rows |= {rank: self._hosts.row(rank, point) for rank in self._remote}
            self._check_failures(rows, watch.error)
            yield list(rows.values())

    def _check_failures(self, rows: dict[int, Row], watched: EngineError | UserError | None) -> None:
        """Raise the error that caused the failure of the ranks, if any rank failed.

        Other failures take precedence over failures that the loss of another rank caused.
        """
        failed = {rank: msgspec.convert(row["failed"], Failed) for rank, row in rows.items() if "failed" in row}
        for failure in failed.values():
            if failure.user_error_code:
                raise UserError(failure.cause, failure.user_error_code)
        super().check_signals()  # what this host knows itself comes before what others say
        if self._hosts is not None and failed and all(failure.lost_peer for failure in failed.values()):
            elsewhere = self._hosts.failure(_LAST_WORDS_S)
            if elsewhere is not None:
                raise elsewhere
        for lost_peer in (False, True):
            for rank, failure in failed.items():
                if failure.lost_peer == lost_peer:
                    raise EngineError(f"rank {rank} failed: {failure.cause}")
            if watched is not None:
                raise watched


def collect(
    job: RankJob,
    size: int,
    on_point: Callable[[Row], None],
    timeout_s: float = POINT_TIMEOUT_S,
    hosts: MeasuringHosts | None = None,
) -> list[list[Row]]:
    """Run a job on `size` ranks and collect the rows of all points.

    Args:
        job: job that every rank runs.
        size: number of ranks.
        on_point: called with each row of the first rank of this host as soon as it is measured.
        timeout_s: time limit for one point, in seconds.
        hosts: the hosts that run the ranks. None for this host alone.
    """
    points = []
    with World(job, size, timeout_s, hosts) as world:
        for rows in world.points():
            on_point(rows[0])
            points.append(rows)
    return points
