"""The demand that a plan must serve: the lengths and the rate of requests."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from longhelix.errors import UserError


@dataclass(frozen=True)
class Kind:
    """Requests of one length."""

    share: float  # fraction of all requests
    input_tokens: int  # length of the prompt
    output_tokens: int  # length of the answer


@dataclass(frozen=True)
class Demand:
    """Kinds of requests and their rate.

    The means `kv_tokens` and `held_tokens` are over time: each request is weighted by the length of its answer.
    """

    kinds: tuple[Kind, ...]  # their shares add up to 1
    rate_per_s: float | None = None  # requests of all kinds per second; None for as many as possible
    prefix_hit: float = 0.0  # fraction of every prompt whose KV is already cached

    def __post_init__(self) -> None:
        for kind in self.kinds:
            for name, tokens in (("isl", kind.input_tokens), ("osl", kind.output_tokens)):
                if tokens < 1:
                    raise UserError(f"{name} is {tokens}: set it to 1 token or more")
        if self.rate_per_s is not None and not (math.isfinite(self.rate_per_s) and self.rate_per_s > 0):
            raise UserError(f"rate is {self.rate_per_s}: set it to a number above 0, in requests per second")
        if not 0 <= self.prefix_hit < 1:
            raise UserError(f"prefix-hit is {self.prefix_hit}: set it to a fraction from 0 to less than 1")

    @classmethod
    def of(cls, lengths: Sequence[tuple[int, int]], rate_per_s: float | None, prefix_hit: float) -> "Demand":
        """Group requests into kinds.

        Requests with prompt lengths between the same two powers of four form one kind. The lengths of a kind are the
        means over its requests. The request with the longest prompt and the longest request are added as kinds with
        share 0. These kinds do not affect means, but they must meet the targets.

        Args:
            lengths: number of tokens of the prompt and of the answer of each request.

        Raises:
            UserError: a length, the rate or the prefix hit is out of range.
        """
        kinds: dict[int, list[tuple[int, int]]] = {}
        for prompt, answer in lengths:
            kinds.setdefault(prompt.bit_length() // 2, []).append((prompt, answer))
        means = [
            Kind(len(alike) / len(lengths), *(round(sum(each) / len(alike)) for each in zip(*alike, strict=True)))
            for _, alike in sorted(kinds.items())
        ]
        longest = {max(lengths), max(lengths, key=sum)} - {(kind.input_tokens, kind.output_tokens) for kind in means}
        return cls((*means, *(Kind(0.0, *each) for each in sorted(longest))), rate_per_s, prefix_hit)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest request, including its answer."""
        return max(kind.input_tokens + kind.output_tokens for kind in self.kinds)

    @property
    def output_tokens(self) -> float:
        """Mean number of tokens per answer."""
        return sum(kind.share * kind.output_tokens for kind in self.kinds)

    @property
    def kv_tokens(self) -> float:
        """Mean number of KV tokens of a running request."""
        return self._over_time(0.5)

    @property
    def held_tokens(self) -> float:
        """Mean number of KV tokens that a running request has when it ends."""
        return self._over_time(1.0)

    def _over_time(self, answered: float) -> float:
        held = (each.share * each.output_tokens * (each.input_tokens + answered * each.output_tokens)
                for each in self.kinds)  # fmt: skip
        return sum(held) / self.output_tokens
