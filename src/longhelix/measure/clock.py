"""Splits the time of a step: native calls by kind, including calls on tapes, and the rest in Python and torch."""

from types import TracebackType
from typing import Self

from longhelix.compute.kernels import native

# Kinds of native calls.
KINDS = ("attention_s", "products_s", "rotation_s", "collectives_s", "other_s")


class Clock:
    """Context manager that adds up the time of native calls for each kind in KINDS, in `seconds`.

    It needs the native kernels. While it is active, each native call takes slightly longer (less than 1 us).
    """

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
        """Mean seconds per run, by kind.

        Args:
            total_s: total time of all runs. `outside_s` in the result is the part that native calls do not explain.
            runs: number of runs.
        """
        kinds = {kind: seconds / runs for kind, seconds in self.seconds.items()}
        return kinds | {"outside_s": total_s / runs - sum(kinds.values())}
