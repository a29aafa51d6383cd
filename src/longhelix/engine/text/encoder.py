"""Text to token ids."""

from itertools import zip_longest
from typing import Protocol

import tokenizers

from longhelix.engine.text.cuts import Cuts


class Encoder(Protocol):
    """A tokenizer's way from texts to ids."""

    def ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """The ids of a text. add_special_tokens: with those that begin and end a prompt, such as a BOS."""
        ...

    def parts(self, text: str) -> list[str]:
        """The part of a text that each of its ids stands for, with special tokens added; together they are the text. ""
        for added ones, and for all but one of a character's tokens."""
        ...


class BackendEncoder:
    """The encoder of a library's tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._cuts = Cuts(backend)

    def ids(self, text: str, add_special_tokens: bool) -> list[int]:
        first, *others = self._cuts.parts(text)
        if not others:
            return self._ids(text, add_special_tokens)
        begin, end = self._ends(first) if add_special_tokens else ([], [])
        found = begin + self._ids(first, False)
        for part in others:
            found += self._ids(part, False)
        return found + end

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        # Of a batch, for that lets other threads run, and without offsets into the text.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _ends(self, text: str) -> tuple[list[int], list[int]]:
        """What is put before a prompt with this text, and behind it."""
        encoding = self._backend.encode(text)
        own = [place for place, is_added in enumerate(encoding.special_tokens_mask) if not is_added]
        return encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]

    def parts(self, text: str) -> list[str]:
        encoding = self._backend.encode_batch([text])[0]
        offsets = encoding.offsets
        own = [place for place, is_added in enumerate(encoding.special_tokens_mask) if not is_added]
        found, at = [""] * len(offsets), 0
        for place, following in zip_longest(own, own[1:]):
            end = len(text) if following is None else max(at, min(offsets[place][1], offsets[following][0]))
            found[place], at = text[at:end], end
        return found
