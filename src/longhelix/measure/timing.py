"""How things are timed: in turn, after a warm-up, so that a slow moment falls on all of them; medians, quartiles."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Timing:
    """Repeated measurements of one thing, in seconds. quartiles_s: None of a single one."""

    median_s: float
    quartiles_s: tuple[float, float] | None

    @classmethod
    def of(cls, samples_s: Sequence[float]) -> Self:
        if len(samples_s) < 2:
            return cls(samples_s[0], None)
        first, median, third = statistics.quantiles(samples_s, n=4, method="inclusive")
        return cls(median, (first, third))

    def over(self, count: int) -> "Timing":
        """The timing of one call, where `count` calls were timed together."""
        if self.quartiles_s is None:
            return Timing(self.median_s / count, None)
        first, third = self.quartiles_s
        return Timing(self.median_s / count, (first / count, third / count))

    def row(self, name: str) -> dict[str, object]:
        """The median as `name`, its quartiles, and their distance over the median as `spread`; None of a single one."""
        if self.quartiles_s is None:
            return {name: self.median_s, f"{name}_quartiles": None, "spread": None}
        first, third = self.quartiles_s
        return {name: self.median_s, f"{name}_quartiles": [first, third], "spread": (third - first) / self.median_s}


def interleave(
    calls: Mapping[str, Callable[[], object]], repeats: int, warm_up: int = WARM_UP_ROUNDS, alternate: bool = False
) -> dict[str, Timing]:
    """Time each call once a round: A, B, A, B, ...; the rounds of the warm-up do not count.

    alternate: A, B, B, A, ..., so that none always follows the same other one.
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
    """How long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def resident_bytes(peak: bool = False) -> int:
    """Memory that this process holds, or has held at most since `forget_peak` (Linux)."""
    name = "VmHWM:" if peak else "VmRSS:"
    status = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in status if line.startswith(name))


def forget_peak() -> None:
    """Let the peak of `resident_bytes` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")
