"""Write a simulation as a trace for chrome://tracing or ui.perfetto.dev, in the engine's trace format."""

from pathlib import Path

from longhelix.compute.runner.trace import TraceEvent, TraceFile
from longhelix.simulate.request_tracker import RequestRecord
from longhelix.simulate.runner import SimulatedStep
from longhelix.simulate.simulation import Observer

_STEPS, _REQUESTS = 0, 1  # process ids in the file


class ChromeTrace(Observer):
    """Observer that writes every step with rows, and the waiting, prefill and decode times of every request.

    Call `close` at the end of the simulation.
    """

    def __init__(self, path: Path) -> None:
        """Open the file at `path`. Raises UserError if it cannot be written."""
        self._file = TraceFile(path)

    def ran(self, step: SimulatedStep) -> None:
        work = step.step.work
        if work.rows:
            details = {"decodes": work.decode_rows, "prompt tokens": work.chunk_rows, "parts": work.parts}
            event = TraceEvent(
                name=f"step {step.step.id}",
                kind="steps",
                start_us=1e6 * step.begin_s,
                end_us=1e6 * step.end_s,
                details=details,
            )
            self._file.write(_STEPS, [event])

    def ended(self, id: int, record: RequestRecord) -> None:
        assert record.begin_s is not None
        assert record.first_s is not None
        assert record.end_s is not None
        times_s = (record.arrival_s, record.begin_s, record.first_s, record.end_s)
        details = {"request": id, "prompt tokens": record.prompt_tokens}
        events = [
            TraceEvent(name=f"request {id}", kind=kind, start_us=1e6 * start_s, end_us=1e6 * end_s, details=details)
            for kind, start_s, end_s in zip(("waiting", "prefill", "decode"), times_s, times_s[1:], strict=False)
        ]
        self._file.write(_REQUESTS, events)

    def close(self) -> None:
        self._file.close()
