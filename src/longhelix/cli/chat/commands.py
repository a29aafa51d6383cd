"""Commands of the chat: /help, /file and others."""

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from longhelix.cli.chat.dialogue import Dialogue
from longhelix.cli.measurements import measurements, plain_table
from longhelix.errors import UserError

# The pattern does not match a path such as /usr/bin, which is part of a message.
_COMMAND = re.compile(r"/([\w?]*)(?:\s+(.*))?", re.DOTALL)


@dataclass(frozen=True)
class ChatCommand:
    """A command of the chat."""

    argument: str  # argument that /help shows after the name; empty if the command takes no argument
    help: str
    run: Callable[[Dialogue, str], None]  # function that receives the dialogue and the argument


def is_command(text: str) -> bool:
    """Whether a message has the form of a command. The command may be unknown."""
    return _COMMAND.fullmatch(text) is not None


def run_command(dialogue: Dialogue, text: str) -> None:
    """Run the command that `text` names. Raises UserError for an unknown name, and suggests the closest name."""
    match = _COMMAND.fullmatch(text)
    assert match is not None
    name, argument = match[1], (match[2] or "").strip()
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        instead = f"did you mean /{near[0]}?" if near else "see /help"
        raise UserError(
            f"unknown command /{name}: {instead} (to send a message that starts with /, put a space before it)"
        )
    COMMANDS[name].run(dialogue, argument)


def _file(dialogue: Dialogue, argument: str) -> None:
    conversation = dialogue.conversation
    if not argument:
        conversation.detach()
        dialogue.notes.print("No file is attached to the next message.")
        return
    attached = conversation.attach(Path(os.path.expanduser(argument)))
    dialogue.notes.print(
        f"Attached {attached.name} to your next message: {attached.num_tokens} tokens. "
        f"{conversation.free_tokens} tokens are left for the message and its answer."
    )


def _system(dialogue: Dialogue, argument: str) -> None:
    conversation = dialogue.conversation
    if argument:
        conversation.begin(argument)
        dialogue.notes.print("Started a new conversation with this system prompt.")
    else:
        dialogue.notes.print(conversation.system or "There is no system prompt. Set one with /system TEXT.")


def _reset(dialogue: Dialogue, argument: str) -> None:
    dialogue.conversation.begin(dialogue.conversation.system)
    kept = " with the same system prompt" if dialogue.conversation.system else ""
    dialogue.notes.print(f"Started a new conversation{kept}.")


def _stats(dialogue: Dialogue, argument: str) -> None:
    table = plain_table() if dialogue.last is None else measurements(dialogue.last, dialogue.llm.config)
    table.add_row("context", dialogue.conversation.fill)
    dialogue.notes.print(table)


def _help(dialogue: Dialogue, argument: str) -> None:
    table = plain_table()
    for name, command in COMMANDS.items():
        table.add_row(f"/{name} {command.argument}", command.help)
    dialogue.notes.print(table)
    dialogue.notes.print(
        "Enter sends, Alt-Enter inserts a line break, Ctrl-C stops an answer. Pasted text is one message."
    )


def _exit(dialogue: Dialogue, argument: str) -> None:
    dialogue.over = True


COMMANDS = {
    "file": ChatCommand("PATH", "Attach a text file to the next message; without PATH, remove all.", _file),
    "system": ChatCommand("TEXT", "Start anew with this system prompt; without TEXT, show it.", _system),
    "reset": ChatCommand("", "Start a new conversation and keep the system prompt.", _reset),
    "stats": ChatCommand("", "Show measurements of the last answer and of the context.", _stats),
    "help": ChatCommand("", "Show this list.", _help),
    "exit": ChatCommand("", "Quit.", _exit),
}
