"""Which guides ranks have compiled. They compile the others within a step, in which everybody waits: few in each."""

from collections.abc import Iterable

from longhelix.scheduler.guide import Guide, KeptGuides
from longhelix.scheduler.request import Request
from longhelix.scheduler.step import NewSequence

_MOST_S = 0.02  # a quarter of the time between tokens that nobody asked for


class CompiledGuides:
    """What ranks compile within a step takes 20 ms at the most, or is one guide.

    The ranks that sample a request's tokens compile its guide when they hear of it, unless they have kept it
    (`KeptGuides`, told the same here; that a text follows a guide, ranks may find later, and so keep more). clocks:
    into how many parts ranks fall that may be in different steps; each has guides of its own.
    """

    def __init__(self, clocks: int) -> None:
        self._kept = [KeptGuides[None]() for _ in range(clocks)]
        self._unheard: list[dict[int, Guide]] = [{} for _ in range(clocks)]  # of requests that begin with the next step
        self._missing: list[dict[Guide, float]] = [{} for _ in range(clocks)]  # of these guides, and what each takes

    def may_begin(self, request: Request, clock: int) -> bool:
        """Whether a request may begin with the next step, beside those that do already."""
        guide, missing = request.sampling.guide, self._missing[clock]
        if guide is None or not missing or guide in missing or guide in self._kept[clock]:
            return True
        return sum(missing.values()) + request.guide_s <= _MOST_S

    def begin(self, request: Request, clock: int) -> None:
        """A request begins with the next step."""
        guide = request.sampling.guide
        if guide is None:
            return
        if guide not in self._kept[clock]:
            self._missing[clock][guide] = request.guide_s
        self._unheard[clock][request.id] = guide

    def end(self, request_id: int) -> None:
        """A request has ended, perhaps before ranks have heard of it: then they were not told its guide."""
        for unheard, missing in zip(self._unheard, self._missing, strict=True):
            guide = unheard.pop(request_id, None)
            if guide is not None and guide not in unheard.values():
                missing.pop(guide, None)

    def heard(self, new: Iterable[NewSequence]) -> None:
        """A step begins these sequences."""
        clocks = set()
        for one in new:
            if one.sampling.guide is not None:
                clock = one.instances[0] if one.instances else 0
                self._kept[clock].want(one.sampling.guide, lambda guide: None)
                self._kept[clock].follow(one.sampling.guide)
                clocks.add(clock)
        for clock in clocks:  # whose ranks hear of all that they have to
            self._unheard[clock].clear()
            self._missing[clock].clear()
            self._kept[clock].trim()
