"""An unfinished request and its text so far."""

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from longhelix.compute.runner.config import EngineConfig
from longhelix.engine.counters import Counters
from longhelix.engine.exchanges import Moment
from longhelix.engine.result import Delta, Result
from longhelix.engine.shown_images import ShownImage
from longhelix.engine.text.reasoning import ReasoningSplitter
from longhelix.engine.text.stop_strings import StopStrings
from longhelix.engine.text.text_stream import TextStream
from longhelix.scheduler.request import Request
from longhelix.scheduler.step import SampledToken
from longhelix.scheduler.token_event import FinishReason, TokenEvent, Usage


@dataclass
class Live:
    """A request that has been added and has not ended."""

    request: Request
    tokens: TextStream  # converts the request's tokens to text
    stops: StopStrings
    deltas: deque[Delta]  # the queue that its caller reads
    arrival: Moment
    context: str | None = None  # name of the saved context with which the prompt begins
    images: Sequence[ShownImage] = ()
    # Number of engine failures while the request ran. The number is reset when the request has produced two tokens
    # after a start. Prefill produces the first token and a decode step the second, so both have then succeeded.
    failures: int = 0
    new_tokens: int = 0  # tokens produced since the request last started
    spent: Usage | None = None  # the request's usage in engines that have failed
    reasoning: ReasoningSplitter | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)  # when each token was produced, on the monotonic clock
    logprobs: list[dict[int, float]] = field(default_factory=list)
    token_texts: list[str] = field(default_factory=list)  # text of each token, including stop strings
    prompt_logprobs: list[dict[int, float] | None] = field(default_factory=lambda: [None])
    ending: SampledToken | None = None  # the end-of-sequence or stop token that ended the request

    def take(self, event: TokenEvent, now_s: float) -> tuple[str, str | None, FinishReason | None]:
        """Record a token event.

        Returns:
            The text of the answer that the event completes, the reasoning that it completes (see `Delta`), and the
            finish reason if the request ends.
        """
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
        """Record that the engine failed.

        Args:
            usage: usage of the request in the engine that failed.
            began: whether the request had started to run.
        """
        self.failures += began
        if began and usage is not None:
            self.spent = usage if self.spent is None else usage.after(self.spent)

    def remaining_request(self) -> Request:
        """Return a request for a restarted engine that continues after the tokens that were already produced."""
        self.new_tokens = 0
        if not self.token_ids:
            self.prompt_logprobs = [None]
            return self.request
        # All prompt log-probabilities were returned before the first token.
        sampling = replace(self.request.sampling, prompt_logprobs=None)
        return replace(self.request, sampling=sampling).resumed(array("i", self.token_ids))

    def result(
        self,
        finish_reason: FinishReason,
        usage: Usage,
        error: str | None,
        *,
        config: EngineConfig,
        counters: Counters,
    ) -> Result:
        """Return the result of the request, which has ended.

        Args:
            finish_reason: why it ended.
            usage: usage of the request in the engine that ended it.
            error: why it failed. None if it did not fail.
            config: the engine's configuration.
            counters: the engine's totals.
        """
        layout, times_s = config.layout, self.times_s
        usage = usage if self.spent is None else usage.after(self.spent)
        return Result(
            text=self.text,
            token_ids=self.token_ids,
            prompt_tokens=len(self.request.prompt_token_ids),
            finish_reason=finish_reason,
            ttft_s=times_s[0] - self.request.arrival_s if times_s else None,
            tbt_s=[after - before for before, after in pairwise(times_s)],
            layout={"kvp": layout.kvp, "tpa": layout.tpa, "tpf": layout.tpf, "ep": layout.ep, "pp": layout.pp},
            kv_tokens_per_rank=list(usage.kv_tokens_per_rank),
            cached_tokens=usage.cached_tokens,
            preemptions=usage.preemptions,
            recomputed_tokens=usage.recomputed_tokens,
            swapped_tokens=usage.swapped_tokens,
            moved_tokens=usage.moved_tokens,
            moved_bytes=usage.moved_tokens * config.moved_bytes_per_token,
            moved_s=usage.moved_s,
            exchanged_bytes_per_token=counters.exchanged_bytes / max(counters.rows, 1),
            hop_b=counters.exchanges.since(self.arrival),
            logprobs=self.logprobs if self.request.sampling.logprobs is not None else None,
            token_texts=self.token_texts if self.request.sampling.logprobs is not None else None,
            error=error,
            prompt_logprobs=self.prompt_logprobs if self.request.sampling.prompt_logprobs is not None else None,
            ending_token_id=None if self.ending is None else self.ending.token_id,
            ending_logprobs=dict(self.ending.logprobs)
            if self.ending is not None and self.request.sampling.logprobs is not None
            else None,
            reasoning=None if self.reasoning is None else self.reasoning.text,
            reasoning_tokens=None if self.reasoning is None else self.reasoning.num_tokens,
        )

    def _cut(self, text: str) -> tuple[str, bool]:
        """Pass the text of the last token through `StopStrings.push`."""
        return self.stops.push(text, exempt=len(self.token_ids) <= self.request.sampling.min_tokens)
