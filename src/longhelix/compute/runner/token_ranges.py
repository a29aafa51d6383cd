"""The ranges of a step's tokens that have a compiled graph each, and which of them keep token shards."""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class TokenRanges:
    """`splits`: the first token counts of ranges, the first range aside, which begins at 1. `sp_min_tokens`: the fewest
    tokens of a step that is sequence-parallel; None: none is. It is one of the splits. `flash_comm`: layers keep token
    shards by themselves, and not by a compiler pass."""

    splits: tuple[int, ...] = ()
    sp_min_tokens: int | None = None
    flash_comm: bool = False

    @property
    def by_pass(self) -> bool:
        """Whether graphs are made sequence-parallel by the compiler pass."""
        return self.sp_min_tokens is not None and not self.flash_comm

    def range_of(self, tokens: int) -> tuple[int, int | None]:
        """The least and the most tokens of the range of a step; None: any number."""
        at = bisect_right(self.splits, tokens)
        least = self.splits[at - 1] if at else 1
        return least, self.splits[at] - 1 if at < len(self.splits) else None

    def shards(self, tokens: int, decodes: bool) -> bool:
        """Whether a step of so many rows is sequence-parallel. decodes: all are of sequences that decode; Helix's sums
        of few rows are faster as they are."""
        return self.sp_min_tokens is not None and tokens >= self.sp_min_tokens and not decodes


ONE_RANGE = TokenRanges()
