"""What time steps take on one layout, fast enough to be asked many times for each step."""

from collections.abc import Callable
from functools import lru_cache

from longhelix.layout import Layout
from longhelix.perf.layouts import Layouts
from longhelix.perf.memory import kv_bytes
from longhelix.perf.scalar import scalar
from longhelix.perf.setting import Setting
from longhelix.perf.step import step_seconds
from longhelix.request import Work

_KEPT = 16  # of what was asked last


class StepCost:
    """`step_seconds` of one layout for plain numbers, in microseconds; a `Cost`.

    Its steps attend in as many parts as they say. The same work is asked for in several numbers of parts, and again by
    who runs it; all but the parts is computed once. local: every request has its KV on one rank, evenly many on each.
    """

    def __init__(self, setting: Setting, layout: Layout, *, local: bool = False) -> None:
        layouts = Layouts.of([layout], local=local, hop_b=False)
        self._setting, self._layout = setting, layout
        *others, parts = Work._fields
        self._of_parts = lru_cache(_KEPT)(
            scalar(lambda numbers: step_seconds(setting, layouts, Work(*numbers)), others, parts)
        )

    def seconds(self, work: Work) -> float:
        return self._of_parts(*work[:-1])(work[-1])

    def by_parts(self, work: Work) -> Callable[[float], float]:
        """Seconds of `work` in a number of parts, whatever parts it says."""
        return self._of_parts(*work[:-1])

    def swap_seconds(self, tokens: int) -> float:
        """What it takes to swap the KV of `tokens` that one rank keeps, out and in again; while others do so too, where
        ranks share a machine's disk."""
        system, layout = self._setting.system, self._layout
        token_bytes = float(kv_bytes(self._setting, Layouts.of([layout]), 1.0, float(layout.kvp))[0])
        sharers = layout.world_size if system.shared else 1
        return 2 * tokens * token_bytes * sharers / system.swap_bytes_per_s
