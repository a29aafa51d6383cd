"""The requests that an engine had when it failed, and that go on once it has begun again."""

from collections.abc import Iterable, Mapping
from contextlib import suppress

from longhelix.engine.contexts import Contexts
from longhelix.engine.core import TokenCore
from longhelix.engine.live import Live
from longhelix.errors import UserError


class LostRequests:
    """In the order in which they go on.

    Those that ran begin one after the other, each when the one before has a token, short prompts first, and those that
    waited after them: a request that always makes the engine fail is then alone among those without a token.
    """

    def __init__(self) -> None:
        self._lost: dict[int, Live] = {}

    def __bool__(self) -> bool:
        return bool(self._lost)

    def pop(self, request_id: int) -> Live | None:
        """Take one out, which ends. None: it is not here."""
        return self._lost.pop(request_id, None)

    def add(self, live: Iterable[Live], core: TokenCore) -> None:
        """The engine `core` fails, and with it these requests."""
        for each in live:
            each.failures += core.prefilled_tokens(each.request.id) > 0
            self._lost[each.request.id] = each
        ordered = sorted(self._lost.values(), key=lambda each: (not each.failures, len(each.request.prompt_token_ids)))
        self._lost = {each.request.id: each for each in ordered}

    def failing(self, most_failures: int) -> list[Live]:
        """Take out those that ran in more failures than that."""
        return [self._lost.pop(id) for id, each in list(self._lost.items()) if each.failures > most_failures]

    def go_on(self, core: TokenCore, contexts: Contexts, running: Mapping[int, Live]) -> Iterable[Live]:
        """Queue those that may begin beside the ones that run, which are to include each before the next is asked
        for."""
        while self._lost and not any(each.failures for each in running.values()):
            live = next(iter(self._lost.values()))
            if live.context is not None:
                with suppress(UserError):  # it is computed, then
                    contexts.load(live.context, live.request.service.cache_salt)
            core.resume(live.begin_again(), live.images)
            del self._lost[live.request.id]
            yield live
