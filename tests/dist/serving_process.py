"""`longhelix serve` as a process, with what it writes to standard error."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time

_START_S, _END_S = 240, 60


class Server:
    """lines: what it has written so far, parsed."""

    def __init__(self, process, lines):
        self.process, self.lines = process, lines

    def line(self, event, timeout_s=_START_S):
        """The first line of that event."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for line in list(self.lines):
                if line["event"] == event:
                    return line
            assert self.process.poll() is None or event == "end", self.lines
            time.sleep(0.02)
        raise AssertionError(f"no line of {event}: {self.lines}")

    def end(self):
        """Tell it to, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(_END_S)


@contextlib.contextmanager
def serving(*flags):
    """A server at any free port, which takes requests.

    It has the built-in model unless `flags` name another: first, or with --model.
    """
    command = [sys.executable, "-m", "longhelix", "serve", "--port", "0", "--log-format", "json"]
    is_named = "--model" in flags or (flags and not flags[0].startswith("--"))
    command += [] if is_named else ["--model", "builtin"]
    lines = []
    with subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True) as process:
        reader = threading.Thread(target=lambda: lines.extend(map(json.loads, process.stderr)))
        reader.start()
        try:
            server = Server(process, lines)
            server.url = server.line("ready")["url"]
            yield server
        finally:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)
            process.kill()
            reader.join()
