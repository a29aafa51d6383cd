"""Console for notes: text in a chat that is neither a message nor an answer."""

from typing import TextIO

from rich.console import Console


def notes_on(stream: TextIO) -> Console:
    """Console that prints text as it is, because names of files and errors may look like markup."""
    return Console(file=stream, markup=False, highlight=False, emoji=False, soft_wrap=True)
