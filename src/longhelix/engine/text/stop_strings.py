"""Cuts text at stop strings."""

from collections.abc import Sequence


class StopStrings:
    """Cuts a stream of text at the first complete stop string.

    The text is cut before the stop string, or after it if `includes` is set.
    """

    def __init__(self, strings: Sequence[str], includes: bool = False) -> None:
        self._strings = tuple(strings)
        self._includes = includes
        self._held = ""
        self._exempt = 0  # number of leading characters of the held text in which no stop string may end

    def push(self, text: str, *, exempt: bool = False) -> tuple[str, bool]:
        """Take the next part of the text.

        Args:
            text: the next part.
            exempt: whether stop strings that end in `text` are ignored. A stop string that begins in `text` may still
                end in a later part.

        Returns:
            The text that can no longer be part of a stop string, and whether a stop string is complete.
        """
        text = self._held + text
        if exempt:
            self._exempt = len(text)
        # Use the match that ends first. If several matches end there, use the one that begins first. The cut then does
        # not depend on how the text was split into calls of `push`.
        begun = [(s, max(self._exempt + 1 - len(s), 0)) for s in self._strings]
        matches = [(at + len(s), at) for s, start in begun if (at := text.find(s, start)) >= 0]
        if matches:
            self._held = ""
            end, start = min(matches)
            return text[: end if self._includes else start], True
        safe = len(text) - max((overlap(text, s) for s in self._strings), default=0)
        self._held, self._exempt = text[safe:], max(self._exempt - safe, 0)
        return text[:safe], False

    def flush(self) -> str:
        """Return the text that was held back. Call this method at the end of the text."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
