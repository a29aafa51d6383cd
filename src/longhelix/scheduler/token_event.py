"""What a request gets in a step, and at its end."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import msgspec

from longhelix.scheduler.sequence import Job
from longhelix.scheduler.step import SampledToken

FinishReason = Literal["stop", "length", "abort", "error"]


class Usage(NamedTuple):
    """What a request held at its end, on each KVP rank, and what it took: see `JobHistory`."""

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
        """Of a request that had begun in another engine before: together with what it took there. Cached were the
        tokens that it found when it first began."""
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
    """A request's new token (None where a stop token ended it), and why the request ended, if it did.

    prompt_logprobs: of the prompt's next tokens, the second one first, where they were asked for; in events without a
    new token, before all others.
    `sampled.error` says what went wrong, where that ended the request. After its end the scheduler has forgotten the
    request; `usage` says what it held.
    ending: the stop token that ended it, which is none of its new tokens.
    """

    request_id: int
    sampled: SampledToken | None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    prompt_logprobs: tuple[Mapping[int, float], ...] = ()
    ending: SampledToken | None = None
