"""Sources of the user's messages: an editor in a terminal, or a pipe with one message per line."""

import signal
import sys
from typing import BinaryIO, Protocol

from rich.console import Console

from longhelix.cli.chat.interrupts import on_interrupt
from longhelix.cli.chat.notes import notes_on
from longhelix.errors import UserError


class MessageSource(Protocol):
    """Source of the user's messages, with a console for notes."""

    notes: Console  # for text that is neither a message nor an answer

    def read(self, fill: str) -> str | None:
        """Read the next message, or None at the end. `fill` says how full the context is, and is shown to the user."""
        ...


def open_message_source() -> MessageSource:
    """Open an editor if standard input and output are terminals, otherwise read lines from standard input."""
    if not (sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())):
        return Pipe(sys.stdin.buffer, notes_on(sys.stderr))
    from longhelix.cli.chat.editor import (
        Editor,
    )  # imported here because it imports prompt_toolkit, which pipes do not need

    return Editor()


class Pipe:
    """Source of messages from a UTF-8 stream with one message per line."""

    def __init__(self, stream: BinaryIO, notes: Console) -> None:
        self._stream = stream
        self.notes = notes

    def read(self, fill: str) -> str | None:
        """Read the next line, or None at the end. Raises UserError if it is not UTF-8."""
        with on_interrupt(signal.default_int_handler):  # Ctrl-C while waiting for a line ends the chat
            line = self._stream.readline()
        if not line:
            return None
        try:
            return line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UserError(f"a line of the input is not UTF-8 at byte {error.start}: convert it to UTF-8") from error
