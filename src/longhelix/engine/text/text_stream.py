"""Text from token ids that come one by one."""

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

import tokenizers

from longhelix.engine.text.token_bytes import TokenBytes

_UTF8 = codecs.getincrementaldecoder("utf-8")
_LONGEST_CHARACTER = 4  # bytes


class TextStream(Protocol):
    """Decodes ids that follow others. The pieces joined are what these add to the text of those."""

    def push(self, token_id: int) -> str:
        """The characters that this id completes, or ""."""
        ...

    def finish(self) -> str:
        """The rest, once no more ids come: one U+FFFD for a character that is still incomplete."""
        ...


class ByteStream:
    """For tokens that stand for bytes.

    before: the ids that come first. hidden: ids that texts do not show. A character that begins in `before` and ends
    here belongs to this text; if it never ends, it does not.
    """

    def __init__(self, tokens: TokenBytes, before: Sequence[int], hidden: Collection[int]) -> None:
        self._tokens, self._hidden = tokens, hidden
        self._begins = not any(tokens[token_id] for token_id in before if token_id not in hidden)
        self._decoder = _UTF8("replace")
        self._decoder.decode(_last_bytes(tokens, before, hidden))
        self._is_cut = bool(self._decoder.getstate()[0])  # `before` ends inside of a character

    def push(self, token_id: int) -> str:
        if token_id in self._hidden:
            return ""
        found = self._tokens[token_id]
        if self._begins and found:
            self._begins, found = False, self._tokens.first(token_id)
        return self._own(self._decoder.decode(found))

    def finish(self) -> str:
        return self._own(self._decoder.decode(b"", final=True))

    def _own(self, text: str) -> str:
        """Without the U+FFFD of a character that was cut before this text."""
        if text and self._is_cut:
            self._is_cut = False
            return text.removeprefix("\ufffd")
        return text


def _last_bytes(tokens: TokenBytes, ids: Sequence[int], hidden: Collection[int]) -> bytes:
    found = b""
    for token_id in reversed(ids):
        if len(found) >= _LONGEST_CHARACTER:
            break
        if token_id not in hidden:
            found = tokens[token_id] + found
    return found


class DecodedStream:
    """For tokens that only the tokenizer's own decoder can make text of. before, hidden: as of `ByteStream`."""

    # A character has at most four bytes: after this many tokens without one complete, the bytes are not text.
    _PATIENCE = 16

    def __init__(self, backend: tokenizers.Tokenizer, before: Sequence[int], hidden: Collection[int]) -> None:
        self._backend, self._hidden = backend, hidden
        # Decoders treat the token that begins a text in another way, so each piece is decoded behind the one before.
        self._context = next(([token_id] for token_id in reversed(before) if self._is_shown(token_id)), [])
        self._context_text = self._decoded(self._context)
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if not self._is_shown(token_id):
            return ""
        self._pending.append(token_id)
        piece = self.finish()
        if not piece or (piece.endswith("\ufffd") and len(self._pending) < self._PATIENCE):
            return ""
        self._context, self._pending = self._pending, []
        self._context_text = self._decoded(self._context)
        return piece

    def finish(self) -> str:
        return self._decoded(self._context + self._pending)[len(self._context_text) :]

    def _is_shown(self, token_id: int) -> bool:
        return token_id not in self._hidden and self._backend.id_to_token(token_id) is not None

    def _decoded(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)
