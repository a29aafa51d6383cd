"""Tracks which guides ranks have compiled, and limits how many new ones they compile in a step."""

from collections.abc import Iterable

from longhelix.scheduler.guide import Guide, KeptGuides
from longhelix.scheduler.request import Request
from longhelix.scheduler.step import NewSequence

_MOST_S = 0.02  # a quarter of the default time between tokens


class CompiledGuides:
    """Limits the guides that ranks compile in a step to 20 ms, or to one guide, because all requests wait meanwhile.

    The ranks that sample a request's tokens compile its guide when it starts, unless they have kept it (`KeptGuides`,
    which gets the same calls here; ranks may notice later that a text follows a guide, and so keep more guides).

    clocks: number of groups of ranks that may be in different steps. Each group has its own guides.
    """

    def __init__(self, clocks: int) -> None:
        self._kept = [KeptGuides[None]() for _ in range(clocks)]
        # Guides of the requests that begin with the next step, by request.
        self._unheard: list[dict[int, Guide]] = [{} for _ in range(clocks)]
        # The guides among these that ranks must compile, with the seconds that it takes.
        self._missing: list[dict[Guide, float]] = [{} for _ in range(clocks)]

    def may_begin(self, request: Request, clock: int) -> bool:
        """Return whether a request may begin with the next step, together with those that already do."""
        guide, missing = request.sampling.guide, self._missing[clock]
        if guide is None or not missing or guide in missing or guide in self._kept[clock]:
            return True
        return sum(missing.values()) + request.guide_s <= _MOST_S

    def begin(self, request: Request, clock: int) -> None:
        """Note that a request begins with the next step."""
        guide = request.sampling.guide
        if guide is None:
            return
        if guide not in self._kept[clock]:
            self._missing[clock][guide] = request.guide_s
        self._unheard[clock][request.id] = guide

    def end(self, request_id: int) -> None:
        """Note that a request has ended. If its first step was not made yet, the ranks do not compile its guide."""
        for unheard, missing in zip(self._unheard, self._missing, strict=True):
            guide = unheard.pop(request_id, None)
            if guide is not None and guide not in unheard.values():
                missing.pop(guide, None)

    def heard(self, new: Iterable[NewSequence]) -> None:
        """Note that a step with these new sequences was made."""
        clocks = set()
        for seq in new:
            if seq.sampling.guide is not None:
                clock = seq.instances[0] if seq.instances else 0
                self._kept[clock].want(seq.sampling.guide, lambda guide: None)
                self._kept[clock].follow(seq.sampling.guide)
                clocks.add(clock)
        for clock in clocks:  # their ranks get all pending guides with this step
            self._unheard[clock].clear()
            self._missing[clock].clear()
            self._kept[clock].trim()
