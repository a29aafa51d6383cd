"""In how many parts a step attends. Each part is exchanged while the next one attends (HOP-B)."""

from dataclasses import dataclass

from longhelix.request import Cost, Work


@dataclass(frozen=True)
class Cut:
    """Chooses the number of parts that takes the fewest seconds by `cost`, or `most` parts where that is given, but
    never more than the rows of the work allow. 1 where a second exchange does not pay."""

    cost: Cost
    most: int | None = None

    def parts(self, work: Work) -> int:
        possible = max(int(work.most_parts), 1)
        return self._fastest(work, possible) if self.most is None else min(self.most, possible)

    def _fastest(self, work: Work, possible: int) -> int:
        """The best of 1, the powers of two, and `possible`. Beyond the best number, more parts take longer."""
        best, best_s = 1, self.cost.seconds(work.in_parts(1))
        while best < possible:
            parts = min(2 * best, possible)
            seconds = self.cost.seconds(work.in_parts(parts))
            if seconds >= best_s:
                break
            best, best_s = parts, seconds
        return best
