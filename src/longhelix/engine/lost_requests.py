"""Requests that were running or waiting when the engine failed. They continue after it has restarted."""

from collections.abc import Iterable, Mapping
from contextlib import suppress

from longhelix.engine.contexts import Contexts
from longhelix.engine.core import TokenCore
from longhelix.engine.live import Live
from longhelix.errors import UserError


class LostRequests:
    """Queue of requests that continue after a restart.

    The queue is ordered by priority. At equal priority, requests that ran during a failure come before requests that
    were waiting.

    Requests that ran during a failure start again one at a time, short prompts first. The next request starts only
    after the previous request has made progress. If one request always makes the engine fail, it is then the only
    suspect. Until the engine has found this request, requests of the same or a lower priority wait here too.
    """

    def __init__(self) -> None:
        self._lost: dict[int, Live] = {}
        self._suspects: list[Live] = []  # restarted requests that ran during a failure

    def __bool__(self) -> bool:
        return bool(self._lost)

    def pop(self, request_id: int) -> Live | None:
        """Remove a request and return it, or return None if it is not in the queue."""
        return self._lost.pop(request_id, None)

    def add(self, live: Iterable[Live], core: TokenCore) -> None:
        """Add the live requests of the engine `core`, which has failed."""
        for each in live:
            began = core.has_begun(each.request.id)
            each.stop(core.abort(each.request.id), began=began)
            self._lost[each.request.id] = each
        self._suspects.clear()
        self._lost = {each.request.id: each for each in sorted(self._lost.values(), key=_sort_key)}

    def take(self, live: Live, running: Mapping[int, Live]) -> bool:
        """Add a new request if it has to wait in this queue. Returns whether it was added."""
        if not self._lost and not self._holds(live, running):
            return False
        self._lost[live.request.id] = live
        self._lost = {each.request.id: each for each in sorted(self._lost.values(), key=_sort_key)}
        return True

    def failing(self, most_failures: int) -> list[Live]:
        """Remove and return the requests that ran during more than `most_failures` failures."""
        return [self._lost.pop(id) for id, each in list(self._lost.items()) if each.failures > most_failures]

    def requeue(self, core: TokenCore, contexts: Contexts, running: Mapping[int, Live]) -> Iterable[Live]:
        """Queue the requests that may start now and yield each of them.

        The caller must add each request to `running` before it gets the next request.
        """
        while self._lost:
            live = next(iter(self._lost.values()))
            if self._holds(live, running):
                return
            try:
                if live.context is not None:
                    with suppress(UserError):  # if the context cannot be loaded, the request computes it
                        contexts.load(live.context, live.request.service.cache_salt)
                core.queue(live.remaining_request(), live.images)
            except Exception:
                # The exception ends the engine. Count it as a failure of this request, although the request never ran.
                live.failures += 1
                raise
            if live.failures:
                self._suspects.append(live)
            del self._lost[live.request.id]
            yield live

    def _holds(self, live: Live, running: Mapping[int, Live]) -> bool:
        """Return whether a request has to wait for other requests that may have made the engine fail."""
        self._suspects = [each for each in self._suspects if each.failures and each.request.id in running]
        return any(each.request.service.priority >= live.request.service.priority for each in self._suspects)


def _sort_key(live: Live) -> tuple[int, bool, int]:
    """Return the sort key of a request. Requests that were waiting stay in the order of their arrival."""
    ran = live.failures > 0
    return -live.request.service.priority, not ran, len(live.request.prompt_token_ids) if ran else 0
