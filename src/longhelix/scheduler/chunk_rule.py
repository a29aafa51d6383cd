"""Chunk rules: how many prompt tokens of each request a step computes."""

from dataclasses import dataclass
from typing import Protocol

from longhelix.request import Work
from longhelix.scheduler.sequence import Sequence


class ChunkRule(Protocol):
    def sizes(self, prompts: list[Sequence], beside: Work) -> list[int]:
        """Tokens of each of `prompts`, the first to be served first, in a step that also computes `beside`.

        At least one size is above 0: a step may be for prompts alone.
        """
        ...


@dataclass(frozen=True)
class FixedChunks:
    """`budget_tokens` in every step.

    Each rank that has prompts to itself gets an even share of the budget, and so do all spread prompts together: no
    rank waits while another computes. What a share leaves over goes to the first.
    """

    budget_tokens: int

    def sizes(self, prompts: list[Sequence], beside: Work) -> list[int]:
        sharers = {seq.home for seq in prompts}
        left = dict.fromkeys(sharers, self.budget_tokens // len(sharers))
        sizes = []
        for seq in prompts:
            sizes.append(min(seq.prompt_left, left[seq.home]))
            left[seq.home] -= sizes[-1]
        over = self.budget_tokens - sum(sizes)
        for index, seq in enumerate(prompts):
            more = min(seq.prompt_left - sizes[index], over)
            sizes[index] += more
            over -= more
        return sizes
