"""Separates the reasoning that a model writes between tags from its answer."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from longhelix.engine.text.stop_strings import overlap
from longhelix.scheduler.guide import ReasoningTags


@dataclass(frozen=True)
class ReasoningForm:
    """How a family of models writes its reasoning. Add new families of models to `FORMS`."""

    begin: str  # tag before the reasoning
    end: str  # tag after the reasoning
    is_implied: bool = False  # True if an answer starts inside the reasoning even without `begin` in prompt or answer

    def is_used_by(self, template: str, tokens: Collection[str]) -> bool:
        """Return whether a model with this chat template and vocabulary may use this form."""
        return self.end in template or (self.begin in tokens and self.end in tokens)


# Forms by the names of vLLM's parsers. "auto" selects the first form that the model uses and that is not implied.
FORMS = {
    "qwen3": ReasoningForm("<think>", "</think>"),
    "deepseek_r1": ReasoningForm("<think>", "</think>", is_implied=True),
}
PARSERS = ("auto", "none", *FORMS)


def form_of(parser: str, template: str, tokens: Collection[str]) -> ReasoningForm | None:
    """Return the form that `parser` selects, or None if reasoning is not separated. `parser` is one of `PARSERS`."""
    if parser != "auto":
        return FORMS.get(parser)
    return next((form for form in FORMS.values() if not form.is_implied and form.is_used_by(template, tokens)), None)


class ReasoningSplitter:
    """Splits an answer that arrives in pieces into the reasoning at its beginning and the content that follows.

    Line ends next to a tag belong to neither part. A tag at any other position is content. The result does not depend
    on how the answer is split into pieces.
    """

    def __init__(self, tags: ReasoningTags) -> None:
        self._begin, self._end = tags.begin, tags.end
        self._has_begun = tags.is_open
        self._held = ""
        self._next: Callable[[], tuple[str, str] | None] = self._start
        self._early_tokens = 0  # tokens pushed before it was clear whether the answer has reasoning
        self.num_tokens = 0  # tokens of the reasoning, including its tags
        self.text = ""  # the reasoning

    @property
    def _is_over(self) -> bool:
        """True if the rest of the answer is content."""
        return self._next in (self._after_tag, self._content)

    def push(self, text: str) -> tuple[str | None, str]:
        """Take the text of the next token.

        Returns:
            The reasoning and the content that the token completes. The reasoning is None if the token is not part of
            it.
        """
        was_undecided, was_over = not self._has_begun, self._is_over
        reasoning, content = self._take(text)
        if was_over or not self._has_begun:
            self._early_tokens += not was_over
            return None, content
        self.num_tokens += 1 + (self._early_tokens if was_undecided else 0)
        return reasoning, content

    def finish(self, text: str = "") -> tuple[str, str]:
        """Take the last text, which belongs to no token. Returns the rest of the reasoning and of the content."""
        reasoning, content = self._take(text)
        held, self._held = self._held, ""
        if self._has_begun and not self._is_over:
            self.text += held
            return reasoning + held, content
        return reasoning, content if self._next == self._after_tag else content + held

    def _take(self, text: str) -> tuple[str, str]:
        self._held += text
        reasoning = content = ""
        while (found := self._next()) is not None:
            reasoning, content = reasoning + found[0], content + found[1]
        self.text += reasoning
        return reasoning, content

    # States of the parser. Each state removes as much as it can from the held text, and returns it as reasoning and
    # content. It returns None if it needs more text.

    def _start(self) -> tuple[str, str] | None:
        stripped = self._held.lstrip()
        if stripped.startswith(self._begin):
            self._held, self._has_begun = stripped.removeprefix(self._begin), True
        elif self._begin.startswith(stripped):
            return None
        elif not self._has_begun:
            self._next = self._content
            return "", ""
        self._next = self._blank
        return "", ""

    def _blank(self) -> tuple[str, str] | None:
        """State before the first character of the reasoning."""
        self._held = self._held.lstrip("\r\n")
        if not self._held:
            return None
        self._next = self._inside
        return "", ""

    def _inside(self) -> tuple[str, str] | None:
        before, tag, after = self._held.partition(self._end)
        if tag:
            self._held, self._next = after, self._after_tag
            return before.rstrip("\r\n"), ""
        # Line ends are held back, because the tag may follow them.
        safe = before[: len(before) - overlap(before, self._end)].rstrip("\r\n")
        self._held = before[len(safe) :]
        return (safe, "") if safe else None

    def _after_tag(self) -> tuple[str, str] | None:
        """State before the first character of the content."""
        self._held = self._held.lstrip("\r\n")
        if not self._held:
            return None
        self._next = self._content
        return "", ""

    def _content(self) -> tuple[str, str] | None:
        content, self._held = self._held, ""
        return ("", content) if content else None
