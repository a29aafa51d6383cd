"""Chunk rules: how many prompt tokens a step takes of whom."""

from dataclasses import dataclass
from typing import Protocol

from longhelix.request import Work
from longhelix.scheduler.sequence import Sequence


class ChunkRule(Protocol):
    def sizes(self, prompts: list[Sequence], beside: Work) -> list[int]:
        """Tokens of each of `prompts`, the first to be served first, in a step that computes `beside` as well.

        One of them is above 0 at least: a step may be for prompts alone.
        """
        ...


@dataclass(frozen=True)
class FixedChunks:
    """`budget_tokens` in every step.

    Ranks that have prompts to themselves get even shares of it, and so do all spread prompts together: none waits while
    another computes. What a share leaves over goes to the first.
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
