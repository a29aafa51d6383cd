"""In how many parts a step attends. Each part is exchanged while the next one attends (HOP-B)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from longhelix.scheduler.work import Work


class CostByParts(Protocol):
    """What time steps take by the number of parts in which they attend."""

    def by_parts(self, work: Work) -> Callable[[float], float]:
        """Seconds of `work` in a number of parts."""
        ...


@dataclass(frozen=True)
class Cut:
    """Chooses the number of parts that takes the fewest seconds by `cost`, or `most` parts where that is given, but
    never more than the rows of the work allow. 1 where a second exchange does not pay."""

    cost: CostByParts
    most: int | None = None

    def parts(self, work: Work) -> int:
        possible = max(int(work.most_parts), 1)
        return self._fastest(work, possible) if self.most is None else min(self.most, possible)

    def _fastest(self, work: Work, possible: int) -> int:
        """The best of 1, the powers of two, and `possible`. Beyond the best number, more parts take longer."""
        seconds = self.cost.by_parts(work)
        best, best_s = 1, seconds(1)
        while best < possible:
            parts = min(2 * best, possible)
            parts_s = seconds(parts)
            if parts_s >= best_s:
                break
            best, best_s = parts, parts_s
        return best
