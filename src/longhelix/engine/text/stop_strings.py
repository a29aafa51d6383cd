"""Strings that end a text before themselves, or behind."""

from collections.abc import Sequence


class StopStrings:
    """Cuts a stream of text where the first stop string to complete begins; where it ends, if the text includes it."""

    def __init__(self, strings: Sequence[str], includes: bool = False) -> None:
        self._strings = tuple(strings)
        self._includes = includes
        self._held = ""
        self._exempt = 0  # characters of what is held, in which no stop string ends

    def push(self, text: str, *, exempt: bool = False) -> tuple[str, bool]:
        """The text that no stop string can claim any more, and whether one is complete. exempt: none ends in `text`,
        but one that begins there may end in what follows."""
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
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
