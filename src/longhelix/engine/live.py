"""A request on its way, with its text."""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from longhelix.engine.exchanges import Moment
from longhelix.engine.result import Delta
from longhelix.engine.shown_images import ShownImage
from longhelix.engine.text.reasoning import ReasoningSplitter
from longhelix.engine.text.stop_strings import StopStrings
from longhelix.engine.text.text_stream import TextStream
from longhelix.scheduler.request import Request
from longhelix.scheduler.step import SampledToken
from longhelix.scheduler.token_event import FinishReason, TokenEvent, Usage


@dataclass
class Live:
    """A request between `add` and its end. context: the saved one that its prompt begins with. failures: how often the
    engine has failed while it ran, since it last had two new tokens: its prompt gave the first one, and a step of
    decodes the second. new_tokens: since it last began. spent: what it took in engines that have failed. reasoning:
    what finds the reasoning in its text, where that was asked for apart."""

    request: Request
    tokens: TextStream
    stops: StopStrings
    deltas: deque[Delta]  # whoever asked for it takes them from here
    arrival: Moment
    context: str | None = None
    images: Sequence[ShownImage] = ()
    failures: int = 0
    new_tokens: int = 0
    spent: Usage | None = None
    reasoning: ReasoningSplitter | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    token_texts: list[str] = field(default_factory=list)  # what each token adds to the text, stop strings included
    prompt_logprobs: list[dict[int, float] | None] = field(default_factory=lambda: [None])
    ending: SampledToken | None = None  # the stop token that ended it

    def take(self, event: TokenEvent, now_s: float) -> tuple[str, str | None, FinishReason | None]:
        """Return the text that a token completes, the part of it that is reasoning (see `Delta`), and the finish reason
        if the request ends."""
        text, stopped = "", False
        if event.sampled is not None:
            self.new_tokens += 1
            if self.new_tokens == 2:
                self.failures = 0
            self.token_ids.append(event.sampled.token_id)
            self.times_s.append(now_s)
            if self.request.sampling.logprobs is not None:
                self.logprobs.append(dict(event.sampled.logprobs))
            self.token_texts.append(self.tokens.push(event.sampled.token_id))
            text, stopped = self._cut(self.token_texts[-1])
        if event.finish_reason is not None and not stopped:
            self.ending = event.ending
            includes = event.ending is not None and self.request.sampling.include_stop_str_in_output
            end = self.tokens.push(event.ending.token_id) if includes else ""
            end += self.tokens.finish()
            if end and not includes:
                self.token_texts[-1] += end
            rest, stopped = self._cut(end)
            text += rest if stopped else rest + self.stops.flush()
        finish_reason = "stop" if stopped else event.finish_reason
        if self.reasoning is None:
            return text, None, finish_reason
        reasoning, content = self.reasoning.push(text) if event.sampled is not None else (None, "")
        if finish_reason is not None:
            more, rest = self.reasoning.finish("" if event.sampled is not None else text)
            reasoning, content = (reasoning or "") + more if more else reasoning, content + rest
        return content, reasoning, finish_reason

    def stop(self, usage: Usage | None, *, began: bool) -> None:
        """The engine has failed, with which it has taken that. began: it did not only wait."""
        self.failures += began
        if began and usage is not None:
            self.spent = usage if self.spent is None else usage.after(self.spent)

    def begin_again(self) -> Request:
        """The rest of the request, for an engine that has nothing of it: after the tokens that it has given."""
        self.new_tokens = 0
        if not self.token_ids:
            self.prompt_logprobs = [None]
            return self.request
        asked = replace(self.request.sampling, prompt_logprobs=None)  # which have come before the first token
        return replace(self.request, sampling=asked).resumed(array("i", self.token_ids))

    def _cut(self, text: str) -> tuple[str, bool]:
        """The text of the last token, as `StopStrings.push` gives it."""
        return self.stops.push(text, exempt=len(self.token_ids) <= self.request.sampling.min_tokens)
