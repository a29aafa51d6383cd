"""What a user asks of the chat itself: /help, /file and the others."""

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from longhelix.cli.chat.dialogue import Dialogue
from longhelix.cli.measurements import measurements, plain_table
from longhelix.errors import UserError

# A path such as /usr/bin is part of a message.
_COMMAND = re.compile(r"/([\w?]*)(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Command:
    """What follows its name, what it does in words, and what it does."""

    argument: str
    help: str
    run: Callable[[Dialogue, str], None]


def is_command(text: str) -> bool:
    return _COMMAND.fullmatch(text) is not None


def run_command(dialogue: Dialogue, text: str) -> None:
    """Do what `text` asks for. Raises UserError, which names the nearest command where there is none of that name."""
    match = _COMMAND.fullmatch(text)
    assert match is not None
    name, argument = match[1], (match[2] or "").strip()
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        instead = f"did you mean /{near[0]}?" if near else "/help lists them"
        raise UserError(f"there is no command /{name}: {instead} (put a space before a message that begins with /)")
    COMMANDS[name].run(dialogue, argument)


def _file(dialogue: Dialogue, argument: str) -> None:
    conversation = dialogue.conversation
    if not argument:
        conversation.detach()
        dialogue.notes.print("Nothing is attached to the next message.")
        return
    attached = conversation.attach(Path(os.path.expanduser(argument)))
    dialogue.notes.print(
        f"{attached.name} goes with your next message: {attached.num_tokens} tokens, "
        f"which leaves {conversation.free_tokens} for the message and its answer."
    )


def _system(dialogue: Dialogue, argument: str) -> None:
    conversation = dialogue.conversation
    if argument:
        conversation.begin(argument)
        dialogue.notes.print("A new conversation begins, with this system prompt.")
    else:
        dialogue.notes.print(conversation.system or "There is no system prompt: /system TEXT sets one.")


def _reset(dialogue: Dialogue, argument: str) -> None:
    dialogue.conversation.begin(dialogue.conversation.system)
    kept = ", with the same system prompt" if dialogue.conversation.system else ""
    dialogue.notes.print(f"A new conversation begins{kept}.")


def _stats(dialogue: Dialogue, argument: str) -> None:
    table = plain_table() if dialogue.last is None else measurements(dialogue.last, dialogue.llm.config)
    table.add_row("context", dialogue.conversation.fill)
    dialogue.notes.print(table)


def _help(dialogue: Dialogue, argument: str) -> None:
    table = plain_table()
    for name, command in COMMANDS.items():
        table.add_row(f"/{name} {command.argument}", command.help)
    dialogue.notes.print(table)
    dialogue.notes.print("Enter sends, Alt-Enter begins a line, a paste is one message. Ctrl-C ends an answer.")


def _exit(dialogue: Dialogue, argument: str) -> None:
    dialogue.over = True


COMMANDS = {
    "file": Command("PATH", "Attach a text file to the next message; alone, attach none.", _file),
    "system": Command("TEXT", "Begin a new conversation with a system prompt; alone, show it.", _system),
    "reset": Command("", "Begin a new conversation; the system prompt stays.", _reset),
    "stats": Command("", "What the last answer took, and how full the context is.", _stats),
    "help": Command("", "This list.", _help),
    "exit": Command("", "Leave.", _exit),
}
