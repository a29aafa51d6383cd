"""Writes what every rank did and when to a trace file for chrome://tracing or ui.perfetto.dev."""

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from longhelix.errors import UserError


@dataclass(frozen=True)
class TraceEvent:
    """Something that a rank did.

    Attributes:
        kind: "compute", "exchange", "collective", "host" for work outside of kernels, or "step" for a whole step.
        start_us: Microseconds of CLOCK_MONOTONIC, which all processes of a host share.
        end_us: As start_us.
        details: For example the layer and the part.
    """

    name: str
    kind: str
    start_us: float
    end_us: float
    details: Mapping[str, int] = field(default_factory=dict)


class TraceFile:
    """A JSON array of complete events (ph "X") in the Trace Event Format. `close` writes the last bracket.

    The rank is the pid, the kind the tid, and the details the args. Overlapping events of one kind get lanes
    ("exchange", "exchange 2", ...), because the events of one thread may only nest. ts and dur are microseconds. Raises
    UserError if `path` cannot be written. If a later write fails, the trace ends with a warning, and the run continues.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except (OSError, ValueError) as error:  # a name that no file can have is the latter
            raise UserError(f"{str(path)!r} cannot be written ({error}): choose another file for the trace") from error
        self._path = path
        self._file.write("[")
        self._separator = "\n"
        self._ends_us: dict[tuple[int, str], list[float]] = {}

    def write(self, rank: int, events: Sequence[TraceEvent]) -> None:
        """Add the events of a rank's next step."""
        if not self._file.closed:
            try:
                self._write(rank, events)
            except OSError as error:
                self._end(error)

    def close(self) -> None:
        """Finish the file. May be called more than once."""
        if not self._file.closed:
            try:
                self._file.write("\n]\n")
                self._file.close()
            except OSError as error:
                self._end(error)

    def _end(self, error: OSError) -> None:
        with suppress(OSError):  # what is still buffered cannot be written either
            self._file.close()
        warnings.warn(f"the trace in {self._path} ends here: {error.strerror}", stacklevel=3)

    def _write(self, rank: int, events: Sequence[TraceEvent]) -> None:
        for event in sorted(events, key=lambda event: event.start_us):
            lane = self._lane(rank, event)
            entry = {
                "name": event.name,
                "cat": event.kind,
                "ph": "X",
                "ts": event.start_us,
                "dur": event.end_us - event.start_us,
                "pid": rank,
                "tid": event.kind if lane == 0 else f"{event.kind} {lane + 1}",
                "args": event.details,
            }
            self._file.write(self._separator + json.dumps(entry))
            self._separator = ",\n"

    def _lane(self, rank: int, event: TraceEvent) -> int:
        ends_us = self._ends_us.setdefault((rank, event.kind), [])
        lane = next((lane for lane, end_us in enumerate(ends_us) if end_us <= event.start_us), len(ends_us))
        ends_us[lane : lane + 1] = [event.end_us]
        return lane
