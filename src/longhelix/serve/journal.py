"""What operators read: lines on standard error, as text or JSON.

One call is one line, whatever is in it: control characters are written as escapes. Nobody waits for a reader: a thread
writes, and where standard error stands still lines are lost, and counted.
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

_MOST_WAITING = 4096  # lines that nobody has read yet
_FLUSH_S = 10.0
_PLAIN = re.compile(r"[A-Za-z0-9_./:,+\-]+")  # what text shows without quotes


class Journal:
    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self._lines: queue.Queue[str | None] = queue.Queue(_MOST_WAITING)
        self._lost = 0
        self._thread = threading.Thread(target=self._write, name="journal", daemon=True)
        self._thread.start()

    def tell(self, event: str, said: str = "", **facts: Any) -> None:
        """One line: what happened, in words, and facts about it. Text has the words where there are some, JSON both.
        Facts that are None are left out."""
        facts = {name: _rounded(fact) for name, fact in facts.items() if fact is not None}
        if self.as_json:
            time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            words = {"message": said} if said else {}
            self._put(json.dumps({"time": time, "event": event} | words | facts))
        elif said:
            self._put(escaped(said))
        else:
            self._put(" ".join([event, *(f"{name}={_shown(fact)}" for name, fact in facts.items())]))

    def close(self) -> None:
        """Wait a little until all lines are written."""
        with contextlib.suppress(queue.Full):
            self._lines.put(None, timeout=_FLUSH_S)
            self._thread.join(_FLUSH_S)

    @contextlib.contextmanager
    def has_logs(self) -> Iterator[None]:
        """Meanwhile, what libraries and we log and warn of is written here."""
        handler, warn = _Handler(self), warnings.showwarning
        logging.getLogger().addHandler(handler)
        warnings.showwarning = lambda message, *where: self.tell("warning", f"warning: {message}")
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

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            lost, self._lost = self._lost, 0
            try:
                print(line, file=sys.stderr, flush=True)
                if lost:
                    self.tell("lost", lines=lost)
            except (OSError, ValueError):  # standard error is gone, and serving goes on
                pass


class _Handler(logging.Handler):
    """Has what libraries and we log written to a journal."""

    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        try:
            said = record.getMessage()
        except Exception:  # of whatever was logged
            said = str(record.msg)
        error = record.exc_info[1] if record.exc_info else None
        trace = "" if error is None else "".join(traceback.format_exception(error))
        facts = {"level": record.levelname.lower(), "logger": record.name, "traceback": trace or None}
        self._journal.tell("log", f"{record.levelname.lower()}: {said}", **facts)
        if trace and not self._journal.as_json:
            for line in trace.splitlines():
                self._journal.tell("log", f"    {line}")


def _rounded(fact: Any) -> Any:
    return round(fact, 6) if isinstance(fact, float) else fact


def _shown(fact: Any) -> str:
    text = str(fact)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
