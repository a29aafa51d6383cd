"""The server's log: lines on standard error, as text or JSON.

Each event is one line, because control characters are escaped. A thread writes the lines, so that a blocked standard
error never blocks the server. Lines that do not fit in the queue are dropped and counted.
"""

import contextlib
import datetime
import json
import logging
import queue
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

from longhelix.values import escaped

_MOST_WAITING = 4096  # maximum number of lines that have not been written yet
_FLUSH_S = 10.0
_PLAIN = re.compile(r"[A-Za-z0-9_./:,+\-]+")  # matches values that need no quotes


class ServerLog:
    """Writes log lines to standard error.

    Args:
        as_json: write one JSON object per line instead of text.
    """

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._lost = 0
        self._thread = threading.Thread(target=self._write_lines, name="log", daemon=True)
        self._thread.start()

    def write(self, event: str, message: str = "", **facts: Any) -> None:
        """Write one line.

        Args:
            event: name of the event.
            message: description of the event. Text lines show the message instead of the facts. JSON lines show both.
            facts: fields of the line. Fields that are None are left out.
        """
        facts = {name: _rounded(fact) for name, fact in facts.items() if fact is not None}
        if self.as_json:
            time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            words = {"message": message} if message else {}
            self._put(json.dumps({"time": time, "event": event} | words | facts))
        elif message:
            self._put(escaped(message))
        else:
            self._put(" ".join([event, *(f"{name}={_shown(fact)}" for name, fact in facts.items())]))

    def close(self) -> None:
        """Wait until all lines are written, but at most ten seconds."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_FLUSH_S)
            self._thread.join(_FLUSH_S)

    @contextlib.contextmanager
    def captures_logs(self) -> Iterator[None]:
        """Return a context manager that redirects messages of `logging` and `warnings` to this log."""
        handler, warn = _Handler(self), warnings.showwarning
        logging.getLogger().addHandler(handler)
        warnings.showwarning = lambda message, *where: self.write("warning", f"warning: {message}")
        try:
            yield
        finally:
            warnings.showwarning = warn
            logging.getLogger().removeHandler(handler)

    def _put(self, line: str) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def _write_lines(self) -> None:
        while (line := self._lines.get()) is not None:
            lost, self._lost = self._lost, 0
            try:
                print(line, file=sys.stderr, flush=True)
                if lost:
                    self.write("lost", lines=lost)
            except (OSError, ValueError):  # standard error is closed, but the server must continue
                pass


class _Handler(logging.Handler):
    """Logging handler that writes to a server log."""

    def __init__(self, log: ServerLog) -> None:
        super().__init__()
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception:  # the arguments may not fit the format string
            message = str(record.msg)
        error = record.exc_info[1] if record.exc_info else None
        trace = "" if error is None else "".join(traceback.format_exception(error))
        facts = {"level": record.levelname.lower(), "logger": record.name, "traceback": trace or None}
        self._log.write("log", f"{record.levelname.lower()}: {message}", **facts)
        if trace and not self._log.as_json:
            for line in trace.splitlines():
                self._log.write("log", f"    {line}")


def _rounded(fact: Any) -> Any:
    return round(fact, 6) if isinstance(fact, float) else fact


def _shown(fact: Any) -> str:
    text = str(fact)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
