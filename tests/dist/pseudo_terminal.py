"""A command in a terminal of its own, typed into and read by a test."""

import os
import pty
import select
import signal
import time

LONGEST_S = 120  # of each wait; then the test fails, and the command is killed


class PseudoTerminal:
    """Runs a command whose standard streams are a terminal. It and its children are gone at the latest with this."""

    def __init__(self, command):
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            # Nobody answers here where the cursor is.
            os.environ.update(TERM="xterm", COLUMNS="100", LINES="40", PROMPT_TOOLKIT_NO_CPR="1")
            os.execvp(command[0], command)
        self._unread = ""
        self._status = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self._status is None:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._terminal)

    def type(self, keys):
        os.write(self._terminal, keys.encode())

    def wait_for(self, text):
        """Read until the terminal has shown `text`."""
        end_s = time.monotonic() + LONGEST_S
        while text not in self._unread:
            assert self._read(end_s - time.monotonic()), f"{text!r} does not come: {self._unread[-2000:]!r}"
        self._unread = self._unread.partition(text)[2]

    def wait_for_end(self):
        """The exit status."""
        end_s = time.monotonic() + LONGEST_S
        while self._read(end_s - time.monotonic()):
            pass
        assert time.monotonic() < end_s, f"the command does not end: {self._unread[-2000:]!r}"
        self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status

    def _read(self, timeout_s):
        """Whether anything came: not after so long, nor after the end."""
        readable, _, _ = select.select([self._terminal], [], [], max(timeout_s, 0))
        try:
            data = os.read(self._terminal, 1 << 16) if readable else b""
        except OSError:  # the command, the terminal's only other end, is gone
            data = b""
        self._unread += data.decode(errors="replace")
        return data != b""
