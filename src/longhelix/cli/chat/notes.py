"""Console for notes: text in a chat that is neither a message nor an answer."""

from typing import TextIO

from rich.console import Console


def notes_on(stream: TextIO) -> Console:
    """Create a console that prints text unchanged, because file names and errors may look like markup."""
    return Console(file=stream, markup=False, highlight=False, emoji=False, soft_wrap=True)
