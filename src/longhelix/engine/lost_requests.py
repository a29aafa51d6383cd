"""The requests that an engine had when it failed, and that go on once it has begun again."""

from collections.abc import Iterable, Mapping
from contextlib import suppress

from longhelix.engine.contexts import Contexts
from longhelix.engine.core import TokenCore
from longhelix.engine.live import Live
from longhelix.errors import UserError


class LostRequests:
    """In the order in which they go on: by priority, and then those that ran before those that waited.

    Those that ran begin one after the other, each when the one before has got on, short prompts first: a request that
    always makes the engine fail is then alone among those that may have done it. Until it is found, others of its
    priority or a lower one wait here as well.
    """

    def __init__(self) -> None:
        self._lost: dict[int, Live] = {}
        self._suspects: list[Live] = []  # those of them that have begun

    def __bool__(self) -> bool:
        return bool(self._lost)

    def pop(self, request_id: int) -> Live | None:
        """Take one out, which ends. None: it is not here."""
        return self._lost.pop(request_id, None)

    def add(self, live: Iterable[Live], core: TokenCore) -> None:
        """The engine `core` has failed, and with it these requests."""
        for each in live:
            began = core.has_begun(each.request.id)
            each.stop(core.abort(each.request.id), began=began)
            self._lost[each.request.id] = each
        self._suspects.clear()
        self._lost = {each.request.id: each for each in sorted(self._lost.values(), key=_turn)}

    def take(self, live: Live, running: Mapping[int, Live]) -> bool:
        """Whether a new request has to wait here."""
        if not self._lost and not self._holds(live, running):
            return False
        self._lost[live.request.id] = live
        self._lost = {each.request.id: each for each in sorted(self._lost.values(), key=_turn)}
        return True

    def failing(self, most_failures: int) -> list[Live]:
        """Take out those that ran in more failures than that."""
        return [self._lost.pop(id) for id, each in list(self._lost.items()) if each.failures > most_failures]

    def go_on(self, core: TokenCore, contexts: Contexts, running: Mapping[int, Live]) -> Iterable[Live]:
        """Queue those that may begin beside the ones that run, which are to include each before the next is asked
        for."""
        while self._lost:
            live = next(iter(self._lost.values()))
            if self._holds(live, running):
                return
            try:
                if live.context is not None:
                    with suppress(UserError):  # it is computed, then
                        contexts.load(live.context, live.request.service.cache_salt)
                core.queue(live.begin_again(), live.images)
            except Exception:  # which ends the engine: only those that have begun are to blame otherwise
                live.failures += 1
                raise
            if live.failures:
                self._suspects.append(live)
            del self._lost[live.request.id]
            yield live

    def _holds(self, live: Live, running: Mapping[int, Live]) -> bool:
        """Whether a request has to wait for others, which may have made the engine fail."""
        self._suspects = [each for each in self._suspects if each.failures and each.request.id in running]
        return any(each.request.service.priority >= live.request.service.priority for each in self._suspects)


def _turn(live: Live) -> tuple[int, bool, int]:
    """By which they are sorted; those that waited stay in the order in which they came."""
    ran = live.failures > 0
    return -live.request.service.priority, not ran, len(live.request.prompt_token_ids) if ran else 0
