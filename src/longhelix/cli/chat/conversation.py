"""Conversation of a chat: messages, attached files, and the fill level of the context."""

import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from longhelix.cli.text_file import read_text
from longhelix.errors import UserError

Message = dict[str, str]

# Maximum average number of bytes per token in any text. Larger files are rejected before they are read.
_MOST_TOKEN_BYTES = 128


@dataclass(frozen=True)
class Attachment:
    """A file that is attached to the next message."""

    name: str
    text: str  # text of the file in the form that the message contains
    num_tokens: int


class Conversation:
    """The messages of a conversation, in a context of limited length."""

    def __init__(self, encode: Callable[[Sequence[Message]], list[int]], context_tokens: int) -> None:
        """Start with an empty conversation.

        Args:
            encode: converts messages to token IDs. Raises UserError if the chat template rejects them.
            context_tokens: length of the context in tokens.
        """
        self._encode = encode
        self.context_tokens = context_tokens
        self.begin("")

    def begin(self, system: str) -> None:
        """Start a new conversation with a system prompt, or without one if it is empty.

        Raises:
            UserError: the model does not accept a system prompt, or the prompt is too long. The conversation stays
                unchanged.
        """
        messages = [{"role": "system", "content": system}] if system else []
        num_tokens = len(self._encode([*messages, _user("?")]))
        if num_tokens >= self.context_tokens:
            raise UserError(
                f"a new conversation starts with {num_tokens} tokens, but the context holds {self.context_tokens}: "
                "shorten the system prompt, or restart with a larger --max-model-len"
            )
        self.system = system
        self._messages = messages
        self._message_tokens = num_tokens
        self._attachments: list[Attachment] = []

    @property
    def free_tokens(self) -> int:
        """Number of free tokens in the context for the next message and its answer."""
        attached = sum(attachment.num_tokens for attachment in self._attachments)
        return self.context_tokens - self._message_tokens - attached

    @property
    def fill(self) -> str:
        """Text that tells the user how full the context is."""
        files = len(self._attachments)
        attached = f", {files} file{'s' * (files > 1)} attached" if files else ""
        return f"{self.context_tokens - self.free_tokens} of {self.context_tokens} tokens{attached}"

    def attach(self, path: Path) -> Attachment:
        """Attach a text file to the next message. Raises UserError if it is missing, not text or too long."""
        text = _file_text(path, self.context_tokens)
        before = len(self._asked("?"))
        num_tokens = len(self._asked(_quoted(path.name, text) + "?")) - before
        if before + num_tokens >= self.context_tokens:
            raise UserError(
                f"{path} has {num_tokens} tokens, but only {max(self.context_tokens - before, 0)} of the context's "
                f"{self.context_tokens} tokens are free: attach a shorter file, or make room with /reset"
            )
        self._attachments.append(Attachment(path.name, _quoted(path.name, text), num_tokens))
        return self._attachments[-1]

    def detach(self) -> None:
        """Remove all attached files."""
        self._attachments.clear()

    def prompt(self, text: str) -> list[int]:
        """Encode the conversation with `text` and the attached files as the next message.

        Raises:
            UserError: the context has no room for an answer.
        """
        token_ids = self._asked(text)
        if len(token_ids) >= self.context_tokens:
            raise UserError(
                f"with this message the conversation has {len(token_ids)} tokens, but the context holds "
                f"{self.context_tokens}: shorten the message, or start a new conversation with /reset"
            )
        return token_ids

    def add(self, text: str, answer: str, num_tokens: int, reasoning: str = "") -> None:
        """Add a message with its attached files, and the answer, to the conversation.

        Args:
            text: the message.
            answer: the answer without reasoning.
            num_tokens: number of tokens of the whole conversation, including the answer.
            reasoning: the reasoning before the answer. The chat template may leave it out.
        """
        extra = {"reasoning_content": reasoning} if reasoning else {}
        self._messages += [_user(self._with_files(text)), {"role": "assistant", "content": answer} | extra]
        self._message_tokens = num_tokens
        self.detach()

    def _asked(self, text: str) -> list[int]:
        return self._encode([*self._messages, _user(self._with_files(text))])

    def _with_files(self, text: str) -> str:
        return "".join(attachment.text for attachment in self._attachments) + text


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _quoted(name: str, text: str) -> str:
    return f'<file name="{name}">\n{text.rstrip()}\n</file>\n\n'


def _file_text(path: Path, most_tokens: int) -> str:
    try:
        status = path.stat()
    except (OSError, ValueError) as error:  # ValueError: the path contains a null character
        raise UserError(
            f"{path} cannot be read ({getattr(error, 'strerror', error)}): give the path of a text file"
        ) from error
    if not stat.S_ISREG(status.st_mode):  # reading from a device may never end
        raise UserError(f"{path} is not a file: give the path of a text file")
    if status.st_size > most_tokens * _MOST_TOKEN_BYTES:
        raise UserError(
            f"{path} has {status.st_size} bytes, more than a context of {most_tokens} tokens can hold: "
            "attach a shorter file"
        )
    text = read_text(path)
    if "\0" in text:
        raise UserError(f"{path} is not text, because it contains a null character: attach a text file")
    return text
