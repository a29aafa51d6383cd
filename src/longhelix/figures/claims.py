"""What a paper prints beside what the model gives, and the tables that explain the difference."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal, Protocol

from longhelix.spec import HardwareSpec

TOLERANCE = 0.15
_CONSTANTS = (
    "memory_bytes_per_s",
    "memory_bytes",
    "memory_efficiency",
    "compute_efficiency",
    "attention_efficiency",
    "kernel_s",
    "collective_s",
    "step_s",
    "part_fixed_share",
    "scale_up.latency_s",
    "scale_up.bytes_per_s",
    "scale_out.latency_s",
    "scale_out.bytes_per_s",
)


@dataclass(frozen=True)
class Claim:
    """One number of a paper, and the model's for the same setting, both in `unit`.

    bound: the paper prints the number itself, or that it is below or above it. formula: pure arithmetic, in which no
    constant of a system is fitted. note: how the two compare, or which assumption decides that they differ.
    """

    figure: str
    what: str
    setting: str
    published: float
    modelled: float
    unit: str
    note: str = ""
    bound: Literal["", "<", ">"] = ""
    formula: bool = False

    @property
    def residual(self) -> float:
        """The model over the paper, less 1."""
        return self.modelled / self.published - 1

    @property
    def holds(self) -> bool:
        """Within TOLERANCE of the published number, or on its side of the bound."""
        if self.bound == "<":
            return self.residual <= 0
        if self.bound == ">":
            return self.residual >= 0
        return abs(self.residual) <= TOLERANCE


@dataclass(frozen=True)
class Table:
    """Rows of numbers and words under one title; `note` says what they show."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Constant:
    """A system's number, and where it comes from; `fitted` to published results, or read off a data sheet."""

    name: str
    value: float
    source: str

    @property
    def fitted(self) -> bool:
        return self.source.startswith("fitted")


def constants(system: HardwareSpec, dtype: str) -> tuple[Constant, ...]:
    """All that enters the model of a system whose products run in `dtype`."""
    rate = Constant(f"flops_per_s.{dtype}", system.rate(dtype), system.sources[f"flops_per_s.{dtype}"])
    return (rate, *(Constant(name, attrgetter(name)(system), system.sources[name]) for name in _CONSTANTS))


class Drawing(Protocol):
    """A figure that can draw itself; `size` in inches."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def size(self) -> tuple[float, float]: ...

    def draw(self, figure: Any) -> None:
        """Draw on an empty figure of matplotlib's."""


@dataclass(frozen=True)
class Reproduction:
    """One paper, modelled: its claims, the constants behind them, what decides them, and its figures."""

    name: str
    title: str
    system: HardwareSpec
    conditions: tuple[str, ...]
    claims: tuple[Claim, ...]
    constants: tuple[Constant, ...]
    tables: tuple[Table, ...]
    drawings: Sequence[Drawing] = field(repr=False)
    left_out: tuple[str, ...] = ()
