"""Chooses in how many parts a step attends. Each part is exchanged while the next one attends (HOP-B)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from longhelix.scheduler.work import Work


class CostByParts(Protocol):
    """Predicts the time of steps by the number of parts in which they attend."""

    def by_parts(self, work: Work) -> Callable[[float], float]:
        """Return the seconds of `work` as a function of the number of parts."""
        ...


@dataclass(frozen=True)
class Cut:
    """Chooses the fastest number of parts by `cost`, or `most` parts if given, within what the rows allow.

    The number is 1 if a second exchange does not pay.
    """

    cost: CostByParts
    most: int | None = None

    def parts(self, work: Work) -> int:
        possible = max(int(work.most_parts), 1)
        return self._fastest(work, possible) if self.most is None else min(self.most, possible)

    def _fastest(self, work: Work, possible: int) -> int:
        """Return the best of 1, the powers of two, and `possible`. Stops at the first number that is slower."""
        seconds = self.cost.by_parts(work)
        best, best_s = 1, seconds(1)
        while best < possible:
            parts = min(2 * best, possible)
            parts_s = seconds(parts)
            if parts_s >= best_s:
                break
            best, best_s = parts, parts_s
        return best
