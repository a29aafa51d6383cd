"""Release the requests of a workload at their arrival times, with at most one unfinished request per session."""

import heapq
import math
from collections import defaultdict, deque

import msgspec

from longhelix.simulate.arrival import Arrival, Workload


class Arrivals:
    """Queue of a workload's requests.

    The queue delays the next request of a session until the previous request of the session has ended.
    """

    def __init__(self, workload: Workload) -> None:
        self._workload = iter(workload)
        self._next = next(self._workload, None)
        self._order = 0
        self._due: list[tuple[float, int, Arrival]] = []  # released session requests: heap of (arrival, order, request)
        self._held: defaultdict[str, deque[Arrival]] = defaultdict(deque)  # delayed requests, by session
        self._busy: set[str] = set()  # sessions with a released request that has not ended
        self._ended_s: dict[str, float] = {}  # end time of each session's last request

    @property
    def next_s(self) -> float | None:
        """Arrival time of the next request; None if no request can arrive before another request ends."""
        times_s = [self._due[0][0]] if self._due else []
        if self._next is not None:
            times_s.append(self._next.arrival_s)
        return min(times_s, default=None)

    def take(self, now_s: float) -> Arrival | None:
        """Remove and return a request that has arrived by `now_s`; None if no request has arrived."""
        while self._next is not None and self._next.arrival_s <= now_s:
            arrival, self._next = self._next, next(self._workload, None)
            if not arrival.session:
                return arrival
            self._held[arrival.session].append(arrival)
            self._release(arrival.session)
        return heapq.heappop(self._due)[2] if self._due and self._due[0][0] <= now_s else None

    def ended(self, arrival: Arrival, now_s: float) -> None:
        """Record that a request that `take` returned has ended."""
        if arrival.session:
            self._busy.remove(arrival.session)
            self._ended_s[arrival.session] = now_s
            self._release(arrival.session)

    def _release(self, session: str) -> None:
        """Release a session's next request, if there is one and the previous request has ended."""
        if session in self._busy or not self._held[session]:
            return
        arrival = self._held[session].popleft()
        arrival_s = max(arrival.arrival_s, self._ended_s.get(session, -math.inf) + arrival.think_s)
        self._busy.add(session)
        self._order += 1
        heapq.heappush(self._due, (arrival_s, self._order, msgspec.structs.replace(arrival, arrival_s=arrival_s)))
