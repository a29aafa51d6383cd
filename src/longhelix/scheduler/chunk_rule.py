"""Chunk rules: how many prompt tokens of each request a step computes."""

from bisect import bisect_right
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Protocol

from longhelix.scheduler.load import AnyLoad
from longhelix.scheduler.sequence import Sequence
from longhelix.scheduler.work import Cost

# Steps without decodes may take this multiple of the target, because no request waits for its next token.
_ALONE = 4.0


class ChunkRule(Protocol):
    """Decides the sizes of chunks. adapts: whether sizes depend on the step's target."""

    @property
    def adapts(self) -> bool: ...

    def sizes(self, prompts: Items[Sequence], beside: AnyLoad, target_s: float) -> list[int]:
        """Return the number of tokens of each prompt in a step that also computes `beside` and should take `target_s`.

        Prompts are in the order of service. At least one size is above 0, because a step may have only prompts.
        """
        ...


@dataclass(frozen=True)
class FixedChunks:
    """Computes `budget_tokens` prompt tokens in every step, however long that takes.

    Each rank with local prompts gets an even share of the budget, and all spread prompts together get one too, so that
    no rank waits while another computes. Unused parts of shares go to the first prompts.
    """

    adapts: ClassVar[bool] = False
    budget_tokens: int

    def sizes(self, prompts: Items[Sequence], beside: AnyLoad, target_s: float) -> list[int]:
        return _shared(self.budget_tokens, prompts)


@dataclass
class AdaptiveChunks:
    """Computes as many tokens as a step can within its target by `cost`, shared as in `FixedChunks`.

    So chunks shrink as attention to earlier tokens grows (Mnemosyne, arXiv 2409.17264, section 4.2). A step has at most
    `most_tokens`, and at least `least_tokens`, so that prompts make progress even if decodes alone take too long.
    """

    adapts: ClassVar[bool] = True
    cost: Cost
    most_tokens: int
    least_tokens: int = 4
    _last_tokens: int = field(default=0, init=False)  # of the last step, near which the search begins

    def sizes(self, prompts: Items[Sequence], beside: AnyLoad, target_s: float) -> list[int]:
        num_left = sum([seq.prompt_left for seq in prompts])
        target_s *= 1.0 if beside.has_decodes else _ALONE
        most = min(self.most_tokens, num_left)
        budgets = _budgets(min(self.least_tokens, most), most)
        fits, beyond = 0, len(budgets)
        behind = bisect_right(budgets, self._last_tokens)
        near = [behind, behind - 1]  # two tries suffice if the budget is that of the last step
        while beyond - fits > 1:
            tried = near.pop() if near else (fits + beyond) // 2
            if not fits < tried < beyond:
                continue
            if self._seconds(budgets[tried], prompts, beside) <= target_s:
                fits = tried
            else:
                beyond = tried
        self._last_tokens = budgets[fits]
        return _shared(budgets[fits], prompts)

    def _seconds(self, budget_tokens: int, prompts: Items[Sequence], beside: AnyLoad) -> float:
        load = beside.copy()
        for seq, size in zip(prompts, _shared(budget_tokens, prompts), strict=False):
            if size:
                load.add_chunk(seq, size)
        return load.seconds(self.cost)


@lru_cache
def _budgets(least: int, most: int) -> list[int]:
    """Return the budgets to choose from. They grow by an eighth, in multiples of 16, which are efficient for kernels.

    Below 16 they are multiples of 4, for prompts so long that even 16 tokens take too long.
    """
    budgets = [least]
    while budgets[-1] < most:
        step = 4 if budgets[-1] < 16 else max(16, 1 << max(budgets[-1].bit_length() - 4, 0))
        budgets.append(min((budgets[-1] // step + 1) * step, most))
    return budgets


def _shared(budget_tokens: int, prompts: Items[Sequence]) -> list[int]:
    """Return the sizes of chunks that share a budget, as `FixedChunks` describes."""
    if len(prompts) == 1:
        return [min(prompts[0].prompt_left, budget_tokens)]
    sharers = {seq.kv.placement.home for seq in prompts}
    if len(sharers) == 1 and prompts[0].prompt_left >= budget_tokens:
        return [budget_tokens] + [0] * (len(prompts) - 1)
    shares = dict.fromkeys(sharers, budget_tokens // len(sharers))
    sizes = []
    for seq in prompts:
        sizes.append(min(seq.prompt_left, shares[seq.kv.placement.home]))
        shares[seq.kv.placement.home] -= sizes[-1]
    unused = budget_tokens - sum(sizes)
    for index, seq in enumerate(prompts):
        if not unused:
            break
        added = min(seq.prompt_left - sizes[index], unused)
        sizes[index] += added
        unused -= added
    return sizes
