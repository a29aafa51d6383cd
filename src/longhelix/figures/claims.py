"""Compare published numbers with numbers of the performance model, and explain the differences in tables."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from longhelix.spec import HardwareSpec

TOLERANCE = 0.15  # largest relative difference from a published number that counts as a match
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
    """One number of a paper, and the model's number for the same setting."""

    figure: str  # figure of the paper that contains the number, or "-" for a number in the text
    what: str  # the quantity that the number measures
    setting: str  # model, layout and lengths
    published: float
    modelled: float
    unit: str  # unit of both numbers
    note: str = ""  # comparison of both numbers, or the assumption that explains their difference
    bound: Literal["", "<", ">"] = ""  # "<" or ">" if the paper gives an upper or lower bound
    formula: bool = False  # True if the model's number does not depend on fitted constants

    @property
    def residual(self) -> float:
        """Relative difference from the published number: modelled / published - 1."""
        return self.modelled / self.published - 1

    @property
    def holds(self) -> bool:
        """True if the model's number is within TOLERANCE of the published number, or satisfies the published bound."""
        if self.bound == "<":
            return self.residual <= 0
        if self.bound == ">":
            return self.residual >= 0
        return abs(self.residual) <= TOLERANCE


@dataclass(frozen=True)
class Table:
    """A table with a title, and rows of numbers and text."""

    name: str  # key of the table in JSON
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]
    note: str = ""  # explanation below the table


@dataclass(frozen=True)
class Constant:
    """A constant of a system, and its source."""

    name: str
    value: float
    source: str  # starts with "fitted" if the value is fitted to published results

    @property
    def fitted(self) -> bool:
        return self.source.startswith("fitted")


def constants(system: HardwareSpec, dtype: str) -> tuple[Constant, ...]:
    """Return the constants of a system that the performance model uses if matrix products run in `dtype`."""
    rate = Constant(f"flops_per_s.{dtype}", system.rate(dtype), system.sources[f"flops_per_s.{dtype}"])
    values = system.constants
    return (rate, *(Constant(name, values[name], system.sources[name]) for name in _CONSTANTS))


class Drawing(Protocol):
    """A figure that matplotlib can draw."""

    @property
    def name(self) -> str:
        """File name, without a suffix."""

    @property
    def title(self) -> str: ...

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches."""

    def draw(self, figure: Any) -> None:
        """Draw on an empty matplotlib figure."""


@dataclass(frozen=True)
class Reproduction:
    """The reproduction of a paper's results with the performance model."""

    name: str  # name of the paper on the command line
    title: str
    system: HardwareSpec  # the paper's system
    conditions: tuple[str, ...]  # assumptions behind the claims
    claims: tuple[Claim, ...]
    constants: tuple[Constant, ...]  # constants of the system behind the claims
    tables: tuple[Table, ...]
    drawings: Sequence[Drawing] = field(repr=False)
    left_out: tuple[str, ...] = ()  # figures and parts of the paper that are not modelled, with the reasons
