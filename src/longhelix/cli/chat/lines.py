"""Where messages come from: a terminal that edits them, or a pipe with one on each line."""

import signal
import sys
from typing import BinaryIO, Protocol

from rich.console import Console

from longhelix.cli.chat.interrupts import on_interrupt
from longhelix.errors import UserError


class Lines(Protocol):
    """Messages, and the console for what is neither a message nor an answer."""

    notes: Console

    def read(self, fill: str) -> str | None:
        """The next message; None once there is no more. `fill`: how full the context is, to be shown."""
        ...


def open_lines() -> Lines:
    """An editor where somebody types and sees it, else the lines of standard input."""
    if not (sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())):
        return Pipe(sys.stdin.buffer, notes_on(sys.stderr))
    from longhelix.cli.chat.editor import Editor  # loads prompt_toolkit, which pipes do without

    return Editor()


def notes_on(stream) -> Console:
    """A console that prints what it is given: names of files and errors are no markup."""
    return Console(file=stream, markup=False, highlight=False, emoji=False, soft_wrap=True)


class Pipe:
    """A message on each line, in UTF-8."""

    def __init__(self, stream: BinaryIO, notes: Console) -> None:
        self._stream = stream
        self.notes = notes

    def read(self, fill: str) -> str | None:
        with on_interrupt(signal.default_int_handler):  # ends the wait, and the chat
            line = self._stream.readline()
        if not line:
            return None
        try:
            return line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(f"a line of the input is not UTF-8 at byte {error.start}: convert it to UTF-8") from error
