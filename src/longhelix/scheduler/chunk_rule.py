"""Chunk rules: how many prompt tokens of each request a step computes."""

from bisect import bisect_right
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar, Protocol

from longhelix.scheduler.load import AnyLoad
from longhelix.scheduler.sequence import Sequence
from longhelix.scheduler.work import Cost

# Steps without decodes may take so many times the target: nobody waits for a next token, and newcomers for the step.
_ALONE = 4.0


class ChunkRule(Protocol):
    """adapts: whether sizes depend on the step's target."""

    @property
    def adapts(self) -> bool: ...

    def sizes(self, prompts: Items[Sequence], beside: AnyLoad, target_s: float) -> list[int]:
        """Tokens of each of `prompts`, the first to be served first, in a step that also computes `beside` and is to
        take `target_s`.

        At least one size is above 0: a step may be for prompts alone.
        """
        ...


@dataclass(frozen=True)
class FixedChunks:
    """`budget_tokens` in every step, however long that takes.

    Each rank that has prompts to itself gets an even share of the budget, and so do all spread prompts together: no
    rank waits while another computes. What a share leaves over goes to the first.
    """

    adapts: ClassVar[bool] = False
    budget_tokens: int

    def sizes(self, prompts: Items[Sequence], beside: AnyLoad, target_s: float) -> list[int]:
        return _shared(self.budget_tokens, prompts)


@dataclass
class AdaptiveChunks:
    """As many tokens as a step can compute in its target by `cost`, shared as `FixedChunks` does; so chunks shrink as
    attention to what is before them grows (Mnemosyne, arXiv 2409.17264, section 4.2).

    Never more than `most_tokens`, nor fewer than `least_tokens`: where decodes alone take too long, prompts get on all
    the same.
    """

    adapts: ClassVar[bool] = True
    cost: Cost
    most_tokens: int
    least_tokens: int = 4
    _last_tokens: int = field(default=0, init=False)  # of the last step, near which the search begins

    def sizes(self, prompts: Items[Sequence], beside: AnyLoad, target_s: float) -> list[int]:
        left = sum([seq.prompt_left for seq in prompts])
        target_s *= 1.0 if beside.has_decodes else _ALONE
        most = min(self.most_tokens, left)
        budgets = _budgets(min(self.least_tokens, most), most)
        fits, beyond = 0, len(budgets)
        behind = bisect_right(budgets, self._last_tokens)
        near = [behind, behind - 1]  # two tries do, where the last step's budget is this one's
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
    """Sizes to choose from: by an eighth of themselves apart, and multiples of 16, because kernels like them; below
    that, of 4, for prompts behind which even 16 tokens take too long."""
    found = [least]
    while found[-1] < most:
        step = 4 if found[-1] < 16 else max(16, 1 << max(found[-1].bit_length() - 4, 0))
        found.append(min((found[-1] // step + 1) * step, most))
    return found


def _shared(budget_tokens: int, prompts: Items[Sequence]) -> list[int]:
    """An even share of the budget to each rank that has prompts to itself, one to all spread prompts together, and what
    these leave over to the first."""
    if len(prompts) == 1:
        return [min(prompts[0].prompt_left, budget_tokens)]
    sharers = {seq.kv.placement.home for seq in prompts}
    if len(sharers) == 1 and prompts[0].prompt_left >= budget_tokens:
        return [budget_tokens] + [0] * (len(prompts) - 1)
    left = dict.fromkeys(sharers, budget_tokens // len(sharers))
    sizes = []
    for seq in prompts:
        sizes.append(min(seq.prompt_left, left[seq.kv.placement.home]))
        left[seq.kv.placement.home] -= sizes[-1]
    over = budget_tokens - sum(sizes)
    for index, seq in enumerate(prompts):
        if not over:
            break
        more = min(seq.prompt_left - sizes[index], over)
        sizes[index] += more
        over -= more
    return sizes
