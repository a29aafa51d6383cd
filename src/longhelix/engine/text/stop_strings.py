"""Cuts text at stop strings."""

from collections.abc import Sequence


class StopStrings:
    """Cuts a stream of text before the first stop string that completes, or after it if `includes` is set."""

    def __init__(self, strings: Sequence[str], includes: bool = False) -> None:
        self._strings = tuple(strings)
        self._includes = includes
        self._held = ""
        self._exempt = 0  # characters of what is held, in which no stop string ends

    def push(self, text: str, *, exempt: bool = False) -> tuple[str, bool]:
        """Take more text.

        Args:
            text: the text.
            exempt: no stop string may end in `text`, but one that begins there may end in later text.

        Returns:
            The text that can no longer be part of a stop string, and whether a stop string is complete.
        """
        text = self._held + text
        if exempt:
            self._exempt = len(text)
        # By end, then by start: the cut does not depend on how the text was split into pushes.
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
        """Return the text that was held back. Call it at the end of the text."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
