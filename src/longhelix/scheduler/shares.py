"""What clients have had of the prefill, so that each has its share of it."""

from collections import Counter
from collections.abc import Mapping

_MOST_GONE = 64  # clients without prompts that are kept beside as many as have some


class Shares:
    """Start-time fair queueing between clients (Goyal and others, SIGCOMM 1996): of those with prompts, the one goes
    next that has had the least for its weight.

    Nobody saves up a share: who comes back after a pause, or was held up by its priority, begins where the one is that
    was served last. weights: by client, 1 where there is none.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._prompts: Counter[str] = Counter()
        self._had: dict[str, float] = {}  # for the weight
        self._served = 0.0  # what the client had had that was served last, before that

    @property
    def compete(self) -> bool:
        """Whether more than one client has prompts."""
        return len(self._prompts) > 1

    def had(self, client: str) -> float:
        return max(self._had.get(client, 0.0), self._served)

    def add(self, client: str) -> None:
        """It has one prompt more."""
        self._prompts[client] += 1

    def remove(self, client: str) -> None:
        """It has one prompt less."""
        self._prompts[client] -= 1
        if not self._prompts[client]:
            del self._prompts[client]
        if len(self._had) > 2 * len(self._prompts) + _MOST_GONE:
            self._had = {client: had for client, had in self._had.items() if had > self._served}

    def charge(self, client: str, amount: float) -> None:
        self._served = self.had(client)
        self._had[client] = self._served + amount / self._weights.get(client, 1.0)
