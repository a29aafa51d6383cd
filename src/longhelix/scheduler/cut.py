"""In how many parts a step attends, of which each is exchanged while the next attends (HOP-B)."""

from dataclasses import dataclass

from longhelix.request import Cost, Work


@dataclass(frozen=True)
class Cut:
    """As many parts as take the fewest seconds by `cost`, or as many as `most` where that is said; and never more than
    the work's rows make. 1 where a second exchange does not pay.
    """

    cost: Cost
    most: int | None = None

    def parts(self, work: Work) -> int:
        possible = max(int(work.most_parts), 1)
        return self._fastest(work, possible) if self.most is None else min(self.most, possible)

    def _fastest(self, work: Work, possible: int) -> int:
        """Of 1, the powers of two and all that are possible. From the best number on, more take longer."""
        best, best_s = 1, self.cost.seconds(work._replace(parts=1))
        while best < possible:
            parts = min(2 * best, possible)
            seconds = self.cost.seconds(work._replace(parts=parts))
            if seconds >= best_s:
                break
            best, best_s = parts, seconds
        return best
