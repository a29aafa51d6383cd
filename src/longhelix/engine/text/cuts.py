"""Cuts long texts into parts. If each part is tokenized alone, the ids are the same as those of the whole text."""

import re
from collections.abc import Iterator

import tokenizers

_PART = 1 << 18  # characters in a part; most parts are at most twice as long
_WINDOW = 64  # characters on each side of a position that decide whether the text can be cut there
_TRIED = 32  # positions to try for each part

# Positions between words, and between lines. Most tokenizers split texts at these positions.
_PLACE = re.compile(r"(?<=\w)(?= \w)|(?<=\w\n)(?=\w)")


class Cuts:
    """Cuts the texts of one tokenizer.

    A tokenizer needs about 150 bytes of memory for each character, so it would need 2.4 GB for a whole text of 16 MB. A
    text is cut only where the tokenizer's own splitter splits it. A tokenizer that does not split texts into words,
    such as SentencePiece's, therefore gets the whole text.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        lengths = (len(token.content) for token in backend.get_added_tokens_decoder().values())
        self._window = max(_WINDOW, *lengths, 0)

    def parts(self, text: str) -> Iterator[str]:
        """Yield the text in parts."""
        start = 0
        while len(text) - start > 2 * _PART:
            stop = self._place(text, start + _PART)
            if stop is None:
                break
            yield text[start:stop]
            start = stop
        yield text[start:]

    def _place(self, text: str, start: int) -> int | None:
        """Return the first position after `start` where the text can be cut, or None if there is none."""
        if self._backend.pre_tokenizer is None:
            return None
        for tried, found in enumerate(_PLACE.finditer(text, start)):
            if tried == _TRIED:
                break
            if self._splits(text[found.start() - self._window : found.start()], text[found.start() :][: self._window]):
                return found.start()
        return None

    def _splits(self, left: str, right: str) -> bool:
        """Return whether the tokenizer splits a text between these two parts."""
        both = left + right
        return self._pieces(both) == self._pieces(left) + self._pieces(right) and self._ids(both) == (
            self._ids(left) + self._ids(right)
        )

    def _pieces(self, text: str) -> list[str]:
        normalizer, splitter = self._backend.normalizer, self._backend.pre_tokenizer
        normal = text if normalizer is None else normalizer.normalize_str(text)
        return [piece for piece, _ in splitter.pre_tokenize_str(normal)]

    def _ids(self, text: str) -> list[int]:
        # `_splits` compares the ids in addition to the pieces, because added tokens are found before a text is split.
        return self._backend.encode(text, add_special_tokens=False).ids
