"""Editor for messages in a terminal, with a history and support for pasting several lines."""

import sys
from collections.abc import Iterable

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter, WordCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output, create_output

from longhelix.cli.chat.commands import COMMANDS
from longhelix.cli.chat.notes import notes_on


class Editor:
    """Prompt for messages.

    Enter sends the message, and Alt-Enter inserts a line break. Ctrl-C clears the prompt. Pressing Ctrl-C twice at an
    empty prompt quits the chat.
    """

    def __init__(self, keys: Input | None = None, output: Output | None = None) -> None:
        """Create an editor. `keys` and `output` default to the terminal, even if answers go to a file."""
        self.notes = notes_on(sys.stdout if sys.stdout.isatty() else sys.stderr)
        self._prompt: PromptSession[str] = PromptSession(
            "> ",
            input=keys,
            output=output or create_output(always_prefer_tty=True),
            prompt_continuation="  ",
            placeholder=[("ansibrightblack", "Send a message, or /help")],
            key_bindings=_bindings(),
            completer=_CommandCompleter(),
            complete_while_typing=False,
        )

    def read(self, fill: str) -> str | None:
        """Read the next message, or None if the user quits. `fill` is shown to the right of the prompt."""
        leaving = False
        while True:
            try:
                return self._prompt.prompt(rprompt=[("ansibrightblack", fill)])
            except EOFError:
                return None
            except KeyboardInterrupt:
                empty = not self._prompt.default_buffer.text
                if empty and leaving:
                    return None
                if empty:
                    self.notes.print("Press Ctrl-C again or type /exit to quit.")
                leaving = empty


def _bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("escape", "enter")
    def insert_line_break(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


class _CommandCompleter(Completer):
    """Completes the names of commands and the path after /file."""

    _names = WordCompleter([f"/{name}" for name in COMMANDS], sentence=True)
    _paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, event: CompleteEvent) -> Iterable[Completion]:
        command, space, path = document.text_before_cursor.partition(" ")
        if command == "/file" and space:
            return self._paths.get_completions(Document(path), event)
        return self._names.get_completions(document, event)
