"""Where the time of a step goes: seconds inside native calls, counted at their doors; the rest is Python and torch."""

import time
from collections import Counter
from types import TracebackType
from typing import Any, Self

from longhelix.kernels import native
from longhelix.kernels.tape import Tape
from longhelix.parallel.collectives import Group

# What is counted as what. A tape runs a step's layers as one native call, attention, products and collectives alike;
# what is not on a tape is counted apart.
_DOORS: tuple[tuple[Any, str, str], ...] = (
    (Tape, "run", "layers_s"),
    (native.module, "attend", "attention_s"),
    (native.module, "expand", "attention_s"),
    (native.module, "linear", "products_s"),
    (native.module, "experts", "products_s"),
    (native.module, "rotate", "rotation_s"),
    (Group, "all_reduce", "collectives_s"),
    (Group, "all_reduce_add", "collectives_s"),
    (Group, "all_to_all", "collectives_s"),
    (Group, "exchange_states", "collectives_s"),
    (Group, "gather", "collectives_s"),
    (Group, "broadcast", "collectives_s"),
)
PARTS = tuple(dict.fromkeys(part for _, _, part in _DOORS))


class Clock:
    """While it is entered, `seconds` counts the time in each of PARTS; a call then takes a fraction of 1 us longer."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._functions = [getattr(owner, name) for owner, name, _ in _DOORS]
        self._inside = False

    def __enter__(self) -> Self:
        for (owner, name, part), function in zip(_DOORS, self._functions, strict=True):
            setattr(owner, name, self._timed(function, part))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for (owner, name, _), function in zip(_DOORS, self._functions, strict=True):
            setattr(owner, name, function)

    def parts(self, total_s: float, runs: int) -> dict[str, float]:
        """Mean seconds of each part in one of `runs` runs that took `total_s` together; `outside_s` is the rest."""
        parts = {part: self.seconds[part] / runs for part in PARTS}
        return parts | {"outside_s": total_s / runs - sum(parts.values())}

    def _timed(self, function, part: str):
        def timed(*arguments, **options):
            if self._inside:  # a door behind a door: its time is counted already
                return function(*arguments, **options)
            self._inside = True
            start = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds[part] += time.perf_counter() - start
                self._inside = False

        return timed
