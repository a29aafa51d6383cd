"""Cuts long texts into parts that give the same ids as the whole text when each is tokenized alone."""

import re
from collections.abc import Iterator

import tokenizers

_PART = 1 << 18  # characters: most parts are at most twice as long
_WINDOW = 64  # characters on each side that decide whether the text can be cut at a place
_TRIED = 32  # places to try for each part

# Between words, and between lines. Most tokenizers split texts there.
_PLACE = re.compile(r"(?<=\w)(?= \w)|(?<=\w\n)(?=\w)")


class Cuts:
    """Cuts the texts of one tokenizer.

    A tokenizer takes some 150 bytes of memory for each character, so a text of 16 MB would take 2.4 GB. A text is cut
    only where the tokenizer's own splitter splits it. So a tokenizer that does not split texts into words, such as
    SentencePiece's, gets them whole.
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
        """Return the first place after `start` where the text can be cut; None if it has none."""
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
        # Compared in addition to the pieces, because added tokens are found before a text is split.
        return self._backend.encode(text, add_special_tokens=False).ids
