"""Times calls, and computes medians and quartiles.

After a warm-up, the compared calls run in turn, so that a slowdown of the machine affects all of them."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Timing:
    """Median and quartiles of repeated measurements."""

    median_s: float
    quartiles_s: tuple[float, float] | None  # None for a single measurement

    @classmethod
    def of(cls, samples_s: Sequence[float]) -> Self:
        """Compute the median and quartiles of measurements in seconds."""
        if len(samples_s) < 2:
            return cls(samples_s[0], None)
        first, median, third = statistics.quantiles(samples_s, n=4, method="inclusive")
        return cls(median, (first, third))

    def over(self, count: int) -> "Timing":
        """Convert the timing of `count` calls to the timing of one call."""
        if self.quartiles_s is None:
            return Timing(self.median_s / count, None)
        first, third = self.quartiles_s
        return Timing(self.median_s / count, (first / count, third / count))

    def row(self, name: str) -> dict[str, object]:
        """Columns of a table row: the median as `name`, the quartiles, and `spread`.

        The spread is the difference of the quartiles divided by the median. For a single measurement, the quartiles and
        the spread are None.
        """
        if self.quartiles_s is None:
            return {name: self.median_s, f"{name}_quartiles": None, "spread": None}
        first, third = self.quartiles_s
        return {name: self.median_s, f"{name}_quartiles": [first, third], "spread": (third - first) / self.median_s}


def interleave(
    calls: Mapping[str, Callable[[], object]], repeats: int, warm_up: int = WARM_UP_ROUNDS, alternate: bool = False
) -> dict[str, Timing]:
    """Time each call once per round: A, B, A, B, ...

    Args:
        calls: calls by name.
        repeats: number of measured rounds.
        warm_up: number of rounds before the measured rounds.
        alternate: reverse every other round (A, B, B, A, ...), so that no call always follows the same other call.
    """
    samples_s: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(warm_up + repeats):
        turns = list(calls.items())
        for name, call in reversed(turns) if alternate and round_number % 2 else turns:
            took_s = seconds(call)
            if round_number >= warm_up:
                samples_s[name].append(took_s)
    return {name: Timing.of(samples) for name, samples in samples_s.items()}


def seconds(call: Callable[[], object]) -> float:
    """Return the time of one call, in seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def resident_bytes(peak: bool = False) -> int:
    """Resident memory of this process in bytes, or its peak since the last `forget_peak` (Linux only)."""
    name = "VmHWM:" if peak else "VmRSS:"
    status = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in status if line.startswith(name))


def forget_peak() -> None:
    """Reset the peak of `resident_bytes`."""
    Path("/proc/self/clear_refs").write_text("5")
