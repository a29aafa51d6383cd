"""Ranges of token counts that have their own compiled graphs, and which of them are sequence-parallel."""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class TokenRanges:
    """Ranges of token counts that have their own compiled graphs.

    Attributes:
        splits: First token count of each range except the first range, which begins at 1.
        sp_min_tokens: Minimum number of tokens of sequence-parallel steps. One of `splits`. None: no step is.
        flash_comm: The layers themselves keep token shards, instead of a compiler pass.
    """

    splits: tuple[int, ...] = ()
    sp_min_tokens: int | None = None
    flash_comm: bool = False

    @property
    def by_pass(self) -> bool:
        """Whether the compiler pass makes graphs sequence-parallel."""
        return self.sp_min_tokens is not None and not self.flash_comm

    def range_of(self, tokens: int) -> tuple[int, int | None]:
        """Return the minimum and maximum tokens of a step's range. A maximum of None means any number."""
        at = bisect_right(self.splits, tokens)
        least = self.splits[at - 1] if at else 1
        return least, self.splits[at] - 1 if at < len(self.splits) else None

    def shards(self, tokens: int, decodes: bool) -> bool:
        """Return whether a step is sequence-parallel. Steps of decodes are not: sums of few rows are faster as they
        are."""
        return self.sp_min_tokens is not None and tokens >= self.sp_min_tokens and not decodes


ONE_RANGE = TokenRanges()
