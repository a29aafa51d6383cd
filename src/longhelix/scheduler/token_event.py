"""Events of requests: new tokens, and the usage at the end."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from longhelix.scheduler.sequence import Job
from longhelix.scheduler.step import SampledToken

FinishReason = Literal["stop", "length", "abort", "error"]


class Usage(NamedTuple):
    """The KV tokens of a request on each KVP rank at its end, and its history (see `JobHistory`)."""

    kv_tokens_per_rank: tuple[int, ...]
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_tokens: int = 0
    moved_tokens: int = 0
    moved_s: float = 0.0

    @classmethod
    def of(cls, job: Job, kv_tokens_per_rank: tuple[int, ...]) -> "Usage":
        history = job.history
        return cls(
            kv_tokens_per_rank=kv_tokens_per_rank,
            cached_tokens=history.cached_tokens,
            preemptions=history.preemptions,
            recomputed_tokens=history.recomputed_tokens,
            swapped_tokens=history.swapped_tokens,
            moved_tokens=history.moved_tokens,
            moved_s=history.moved_s,
        )

    def after(self, earlier: "Usage") -> "Usage":
        """Add the usage of the same request in an earlier engine. `cached_tokens` are those of its first start."""
        return Usage(
            kv_tokens_per_rank=self.kv_tokens_per_rank,
            cached_tokens=earlier.cached_tokens,
            preemptions=earlier.preemptions + self.preemptions,
            recomputed_tokens=earlier.recomputed_tokens + self.recomputed_tokens,
            swapped_tokens=earlier.swapped_tokens + self.swapped_tokens,
            moved_tokens=earlier.moved_tokens + self.moved_tokens,
            moved_s=earlier.moved_s + self.moved_s,
        )


class TokenEvent(msgspec.Struct, frozen=True, gc=False):
    """A request's new token, or its end.

    Attributes:
        sampled: The new token. None if a stop token ended the request. `sampled.error` is the error that ended it.
        finish_reason: Why the request ended, if it did. The scheduler then forgets the request.
        usage: The request's usage, at its end.
        prompt_logprobs: Log-probabilities of the prompt's next tokens, from the second one on, if requested. Only in
            events without a new token, which come before all others.
        ending: The stop token that ended the request. It is not one of its new tokens.
    """

    request_id: int
    sampled: SampledToken | None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    prompt_logprobs: tuple[Mapping[int, float], ...] = ()
    ending: SampledToken | None = None
