"""What clients have had of the prefill, so that each has its share of it."""

from collections import Counter
from collections.abc import Mapping


class Shares:
    """Fair queueing between clients: of those with prompts, the one goes next that has had the least for its weight.

    Who comes back after a pause begins where the others are, so that nobody saves up a share. weights: by client, 1
    where there is none.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._prompts: Counter[str] = Counter()
        self._had: dict[str, float] = {}  # for the weight, of those with prompts
        self._least = 0.0

    @property
    def compete(self) -> bool:
        """Whether more than one client has prompts."""
        return len(self._prompts) > 1

    def had(self, client: str) -> float:
        return self._had[client]

    def add(self, client: str) -> None:
        """It has one prompt more."""
        if client not in self._prompts:
            self._had[client] = max(self._least, self._had.get(client, 0.0))
        self._prompts[client] += 1

    def remove(self, client: str) -> None:
        """It has one prompt less."""
        self._prompts[client] -= 1
        if not self._prompts[client]:
            del self._prompts[client]
            # What it has had is kept while it is ahead of the others: leaving and coming back clears nothing.
            self._advance()

    def charge(self, client: str, amount: float) -> None:
        self._had[client] += amount / self._weights.get(client, 1.0)
        self._advance()

    def _advance(self) -> None:
        self._least = min((self._had[client] for client in self._prompts), default=max(self._had.values()))
        ahead = {client: had for client, had in self._had.items() if client in self._prompts or had > self._least}
        self._had = ahead
