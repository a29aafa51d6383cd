"""A conversation: its messages, the files that go with the next one, and what they fill of the context."""

import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from longhelix.cli.text_file import read_text
from longhelix.errors import UserError

Message = dict[str, str]

# On average no text has so many bytes in a token: a file with more is refused before it is read.
_MOST_TOKEN_BYTES = 128


@dataclass(frozen=True)
class Attachment:
    """A file: its name, its text as a message quotes it, and the tokens of that."""

    name: str
    text: str
    num_tokens: int


class Conversation:
    """Messages in a context of `context_tokens`. `encode` makes token ids of messages, and raises UserError where the
    model's chat template takes none."""

    def __init__(self, encode: Callable[[Sequence[Message]], list[int]], context_tokens: int) -> None:
        self._encode = encode
        self.context_tokens = context_tokens
        self.begin("")

    def begin(self, system: str) -> None:
        """Begin anew with a system prompt, or with none if it is empty. Raises UserError, and changes nothing, if the
        model takes none or it is too long."""
        messages = [{"role": "system", "content": system}] if system else []
        num_tokens = len(self._encode([*messages, _user("?")]))
        if num_tokens >= self.context_tokens:
            raise UserError(
                f"a conversation begins with {num_tokens} tokens, but the context holds {self.context_tokens}: "
                "shorten the system prompt, or start with a larger --max-model-len"
            )
        self.system = system
        self._messages = messages
        self._message_tokens = num_tokens
        self._attachments: list[Attachment] = []

    @property
    def free_tokens(self) -> int:
        """What the context leaves for the next message and its answer."""
        attached = sum(attachment.num_tokens for attachment in self._attachments)
        return self.context_tokens - self._message_tokens - attached

    @property
    def fill(self) -> str:
        """How full the context is, in words."""
        files = len(self._attachments)
        attached = f", {files} file{'s' * (files > 1)} attached" if files else ""
        return f"{self.context_tokens - self.free_tokens} of {self.context_tokens} tokens{attached}"

    def attach(self, path: Path) -> Attachment:
        """Let a file's text go with the next message. Raises UserError for one that is missing, not text or too
        long."""
        text = _file_text(path, self.context_tokens)
        before = len(self._asked("?"))
        num_tokens = len(self._asked(_quoted(path.name, text) + "?")) - before
        if before + num_tokens >= self.context_tokens:
            raise UserError(
                f"{path} has {num_tokens} tokens, but of the context's {self.context_tokens} only "
                f"{max(self.context_tokens - before, 0)} are left: attach a shorter file, or make room with /reset"
            )
        self._attachments.append(Attachment(path.name, _quoted(path.name, text), num_tokens))
        return self._attachments[-1]

    def detach(self) -> None:
        """Let no file go with the next message."""
        self._attachments.clear()

    def prompt(self, text: str) -> list[int]:
        """The token ids that ask for an answer to `text` and to what is attached. Raises UserError if they leave no
        room for one."""
        token_ids = self._asked(text)
        if len(token_ids) >= self.context_tokens:
            raise UserError(
                f"with this message the conversation has {len(token_ids)} tokens, but the context holds "
                f"{self.context_tokens}: shorten the message, or begin a new conversation with /reset"
            )
        return token_ids

    def add(self, text: str, answer: str, num_tokens: int, reasoning: str = "") -> None:
        """Keep a message, what was attached to it, its answer, and the reasoning before that, which the chat template
        may leave out. `num_tokens`: of all messages so far."""
        told = {"reasoning_content": reasoning} if reasoning else {}
        self._messages += [_user(self._with_files(text)), {"role": "assistant", "content": answer} | told]
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
    except (OSError, ValueError) as error:  # ValueError: no file can have such a path
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from error
    if not stat.S_ISREG(status.st_mode):  # a device may have no end
        raise UserError(f"{path} is not a file: give the path of a text file")
    if status.st_size > most_tokens * _MOST_TOKEN_BYTES:
        raise UserError(
            f"{path} has {status.st_size} bytes, more than a context of {most_tokens} tokens can hold: "
            "attach a shorter file"
        )
    text = read_text(path)
    if "\0" in text:
        raise UserError(f"{path} is not text: it holds the character 0")
    return text
