"""Converts text to token ids."""

from itertools import zip_longest
from typing import Protocol

import tokenizers

from longhelix.engine.text.cuts import Cuts


class Encoder(Protocol):
    """Converts text to token ids."""

    def ids(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text. add_special_tokens: whether to add the tokens around a prompt, such as BOS."""
        ...

    def parts(self, text: str) -> list[str]:
        """Return the part of a text that each id represents, including the special tokens around a prompt.

        The joined parts are the text. If a special token is not in the text, its part is "". If several tokens make up
        a single character, one token has the character as its part, and the part of the other tokens is "".
        """
        ...


class BackendEncoder:
    """Encoder that uses a tokenizer from the `tokenizers` library."""

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
        # Encode a batch of one text, because batches let other threads run. The fast variant computes no text offsets.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def _ends(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids that the tokenizer adds before and after a prompt with this text."""
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
