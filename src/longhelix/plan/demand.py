"""What requests are like, and how many come."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from longhelix.errors import UserError


@dataclass(frozen=True)
class Kind:
    """Requests of one length. share: of all requests; input_tokens: of a prompt; output_tokens: of an answer."""

    share: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Demand:
    """kinds: their shares add up to 1. rate_per_s: of requests of all kinds; None: as many as are served. prefix_hit:
    the share of every prompt whose KV is there before it comes.

    Means are over time: a request counts as long as its answer takes.
    """

    kinds: tuple[Kind, ...]
    rate_per_s: float | None = None
    prefix_hit: float = 0.0

    def __post_init__(self) -> None:
        for kind in self.kinds:
            for name, tokens in (("isl", kind.input_tokens), ("osl", kind.output_tokens)):
                if tokens < 1:
                    raise UserError(f"{name} is {tokens}: set it to 1 token or more")
        if self.rate_per_s is not None and not (math.isfinite(self.rate_per_s) and self.rate_per_s > 0):
            raise UserError(f"rate is {self.rate_per_s}: set it above 0 requests a second")
        if not 0 <= self.prefix_hit < 1:
            raise UserError(f"prefix-hit is {self.prefix_hit}: set it to a share from 0 to less than 1")

    @classmethod
    def of(cls, lengths: Sequence[tuple[int, int]], rate_per_s: float | None, prefix_hit: float) -> "Demand":
        """From the lengths of prompts and answers: those between two powers of four are one kind, of their mean
        lengths; the longest is a kind besides, of which there are none, but which has to be served in time. Raises
        UserError for what is out of range."""
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
        """Tokens of the longest request, answer included."""
        return max(kind.input_tokens + kind.output_tokens for kind in self.kinds)

    @property
    def output_tokens(self) -> float:
        """Of an answer, on average."""
        return sum(kind.share * kind.output_tokens for kind in self.kinds)

    @property
    def kv_tokens(self) -> float:
        """That a running request holds, on average."""
        return self._over_time(0.5)

    @property
    def held_tokens(self) -> float:
        """That a running request holds at its end, on average."""
        return self._over_time(1.0)

    def _over_time(self, answered: float) -> float:
        held = (each.share * each.output_tokens * (each.input_tokens + answered * each.output_tokens)
                for each in self.kinds)  # fmt: skip
        return sum(held) / self.output_tokens
