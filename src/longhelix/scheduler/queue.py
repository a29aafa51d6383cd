"""The requests that wait to be admitted."""

import bisect
from collections.abc import Callable, Iterator
from typing import Any

from longhelix.scheduler.sequence import Job

_MOST_GONE = 64  # removed requests that the order may contain, beyond one per waiting request
_FRESH_S = 0.1  # how long an order stays valid, because sorting all waiting requests takes time

Key = Callable[[Job, float], tuple[Any, ...]]


class WaitingQueue:
    """The waiting requests in the order of `key`, the smallest first.

    changes: whether the order may have changed at the same time.
    """

    def __init__(self, key: Key, changes: Callable[[], bool]) -> None:
        self._key = key
        self._changes = changes
        self._jobs: dict[int, Job] = {}
        self._order: list[tuple[tuple[Any, ...], Job]] = []  # may still contain removed requests
        self._ordered_s = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    def push(self, job: Job, now_s: float) -> None:
        self._jobs[job.request.id] = job
        bisect.insort(self._order, (self._key(job, now_s), job), key=_first)

    def pop(self, request_id: int) -> Job | None:
        """Remove and return a request. None if it does not wait."""
        job = self._jobs.pop(request_id, None)
        if len(self._order) > 2 * len(self._jobs) + _MOST_GONE:
            self._order = [entry for entry in self._order if self._waits(entry[1])]
        return job

    def in_order(self, now_s: float) -> Iterator[Job]:
        """Yield the waiting requests in order. The caller may remove a request while it iterates."""
        if self._changes() or now_s - self._ordered_s >= _FRESH_S:
            self._order = sorted(((self._key(job, now_s), job) for job in self._jobs.values()), key=_first)
            self._ordered_s = now_s
        for _, job in self._order:
            if self._waits(job):
                yield job

    def _waits(self, job: Job) -> bool:
        return self._jobs.get(job.request.id) is job


def _first(entry: tuple[tuple[Any, ...], Job]) -> tuple[Any, ...]:
    return entry[0]
