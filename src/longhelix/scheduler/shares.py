"""Divides prefill time fairly between clients."""

from collections import Counter
from collections.abc import Mapping

_MOST_GONE = 64  # clients without prompts that are remembered, beyond one per client with prompts


class Shares:
    """Start-time fair queueing between clients (Goyal and others, SIGCOMM 1996).

    The client with prompts that has had the least prefill time relative to its weight goes next. Clients cannot save up
    a share: after a pause, a client begins at the level of the client served last. weights: by client, 1 by default.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._prompts: Counter[str] = Counter()
        self._had: dict[str, float] = {}  # prefill time divided by the weight
        self._served = 0.0  # what the client served last had had before

    @property
    def compete(self) -> bool:
        """Whether more than one client has prompts."""
        return len(self._prompts) > 1

    def had(self, client: str) -> float:
        return max(self._had.get(client, 0.0), self._served)

    def add(self, client: str) -> None:
        """Add a prompt of a client."""
        self._prompts[client] += 1

    def remove(self, client: str) -> None:
        """Remove a prompt of a client."""
        self._prompts[client] -= 1
        if not self._prompts[client]:
            del self._prompts[client]
        if len(self._had) > 2 * len(self._prompts) + _MOST_GONE:
            self._had = {client: had for client, had in self._had.items() if had > self._served}

    def charge(self, client: str, amount: float) -> None:
        self._served = self.had(client)
        self._had[client] = self._served + amount / self._weights.get(client, 1.0)
