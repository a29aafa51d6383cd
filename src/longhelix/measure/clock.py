"""Where the time of a step goes: seconds inside native calls, those on tapes too; the rest is Python and torch."""

from types import TracebackType
from typing import Self

from longhelix.compute.kernels import native

# What native calls count as.
KINDS = ("attention_s", "products_s", "rotation_s", "collectives_s", "other_s")


class Clock:
    """While it is entered, `seconds` counts the time in each of KINDS; a native call then takes a fraction of 1 us
    longer. Needs the native kernels."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(KINDS, 0.0)

    def __enter__(self) -> Self:
        self._before = native.module.seconds()
        native.module.time_calls(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        native.module.time_calls(False)
        for name, seconds in native.module.seconds().items():
            self.seconds[f"{name}_s"] += seconds - self._before[name]

    def mean(self, total_s: float, runs: int) -> dict[str, float]:
        """Mean seconds of each kind in one of `runs` runs that took `total_s` together; `outside_s` is the rest."""
        kinds = {kind: seconds / runs for kind, seconds in self.seconds.items()}
        return kinds | {"outside_s": total_s / runs - sum(kinds.values())}
