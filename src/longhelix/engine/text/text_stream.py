"""Decodes token ids to text one by one."""

import codecs
from collections.abc import Collection, Sequence
from typing import Protocol

import tokenizers

from longhelix.engine.text.token_bytes import TokenBytes

_UTF8 = codecs.getincrementaldecoder("utf-8")
_LONGEST_CHARACTER = 4  # bytes


class TextStream(Protocol):
    """Decodes token ids that follow earlier ids. The joined pieces are the text that the new ids add."""

    def push(self, token_id: int) -> str:
        """Return the characters that this id completes, or ""."""
        ...

    def finish(self) -> str:
        """Return the rest of the text after the last id. An incomplete character becomes one U+FFFD."""
        ...


class ByteStream:
    """Text stream for tokens that represent bytes.

    A character that begins in `before` and ends in the new ids belongs to the new text. If the character remains
    incomplete, it does not belong to the new text.

    Args:
        tokens: the bytes of each token.
        before: the earlier ids.
        hidden: ids of tokens that the text leaves out.
    """

    def __init__(self, tokens: TokenBytes, before: Sequence[int], hidden: Collection[int]) -> None:
        self._tokens, self._hidden = tokens, hidden
        self._begins = not any(tokens[token_id] for token_id in before if token_id not in hidden)
        self._decoder = _UTF8("replace")
        self._decoder.decode(_last_bytes(tokens, before, hidden))
        self._is_cut = bool(self._decoder.getstate()[0])  # True if `before` ends inside a character

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
        """Return text without the U+FFFD that replaces an incomplete character from `before`."""
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
    """Text stream for tokens that only the tokenizer's own decoder can decode.

    Args:
        backend: the tokenizer.
        before: the earlier ids.
        hidden: ids of tokens that the text leaves out.
    """

    # Number of tokens after which incomplete bytes cannot become a character, because a character has at most 4 bytes.
    _PATIENCE = 16

    def __init__(self, backend: tokenizers.Tokenizer, before: Sequence[int], hidden: Collection[int]) -> None:
        self._backend, self._hidden = backend, hidden
        # Decoders treat the first token of a text differently, so each piece is decoded together with the previous one.
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
