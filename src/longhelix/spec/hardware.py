"""Hardware: rates, sizes and fixed costs of one GPU and its links, each with its source."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from longhelix.errors import UserError
from longhelix.spec.formats import FORMATS


@dataclass(frozen=True)
class Link:
    """One level of the network.

    Attributes:
        latency_s: Latency of a message.
        bytes_per_s: Bandwidth per GPU and direction.
        ranks: Number of ranks that it connects.
    """

    latency_s: float
    bytes_per_s: float
    ranks: int


@dataclass(frozen=True)
class MemorySpec:
    """The memory of a GPU.

    Attributes:
        size_bytes: All memory.
        reserve_bytes: Memory of the driver, contexts, communication buffers, graphs and fragments.
        bytes_per_s: Bandwidth.
        efficiency: Fraction of `bytes_per_s` that kernels reach.
        swap_bytes_per_s: Bandwidth of swapped KV, which is in the host's memory or on a disk.
    """

    size_bytes: float
    reserve_bytes: float
    bytes_per_s: float
    efficiency: float
    swap_bytes_per_s: float


@dataclass(frozen=True)
class ArithmeticSpec:
    """The arithmetic of a GPU.

    Attributes:
        flops_per_s: Peak dense operations per second, by dtype.
        efficiency: Fraction of `flops_per_s` that kernels reach.
        attention_efficiency: Fraction of `flops_per_s` that attention reaches.
    """

    flops_per_s: Mapping[str, float] = field(hash=False)
    efficiency: float
    attention_efficiency: float


@dataclass(frozen=True)
class NetworkSpec:
    """The links between GPUs.

    Attributes:
        node_ranks: Ranks of one server or tray.
        scale_up: The closest domain of ranks: one server or several.
        scale_out: The network beyond it. Its `ranks` is the largest possible number.
        in_switch_reduction: The switches of `scale_up` can add up (NVLink SHARP).
    """

    node_ranks: int
    scale_up: Link
    scale_out: Link
    in_switch_reduction: bool


@dataclass(frozen=True)
class FixedCosts:
    """Costs that do not depend on the amount of work, in seconds.

    Attributes:
        kernel_s: Of every kernel.
        collective_s: Of every collective, without the latency of its link.
        step_s: Of every step in each pipeline stage (scheduling and sampling on its host).
        part_s: Overhead of each part of a batch (HOP-B): cutting, packing, starting and merging it.
        part_share: Share of an exchange's fixed cost that each of its parts pays again. 0: the parts divide it, as in
            Figure 3 of arXiv 2507.07120. 1: each part is a collective of its own.
    """

    kernel_s: float
    collective_s: float
    step_s: float
    part_s: float
    part_share: float


@dataclass(frozen=True)
class HardwareSpec:
    """One GPU of a system, and its links to other GPUs, in seconds, bytes and operations.

    System files have these constants by the names in `_KINDS`.

    Attributes:
        name: Name of the system.
        memory: Sizes and rates of its memory.
        arithmetic: Rates of its arithmetic.
        network: Its links to other GPUs.
        fixed: Costs of every kernel, collective, step and part.
        shared: Ranks are processes of one machine, so each of N ranks has 1/N of its bandwidth and arithmetic. For
            several such machines, see `of_machines`. Each is a scale_up domain.
        cores: Cores of that machine. If there are more ranks, they take turns.
        sources: The source of each number, by its name in system files ("scale_up.latency_s").
    """

    name: str
    memory: MemorySpec
    arithmetic: ArithmeticSpec
    network: NetworkSpec
    fixed: FixedCosts
    shared: bool
    cores: int
    sources: Mapping[str, str] = field(compare=False, repr=False)

    @property
    def usable_bytes(self) -> float:
        """Memory that weights, KV and steps may fill."""
        return self.memory.size_bytes - self.memory.reserve_bytes

    def computes_in(self, dtype: str) -> bool:
        """Return whether the hardware can compute products in `dtype`, if necessary in bfloat16."""
        return self._rate(dtype) is not None

    def rate(self, dtype: str) -> float:
        """Return peak dense operations per second of products in `dtype`. Raises UserError if there are none."""
        rate = self._rate(dtype)
        if rate is None:
            known = ", ".join(self.arithmetic.flops_per_s)
            raise UserError(
                f"the system {self.name} has no arithmetic in {dtype}: use one of {known}",
                "unsupported_dtype",
            )
        return rate

    def _rate(self, dtype: str) -> float | None:
        format = FORMATS.get(dtype)
        rates = self.arithmetic.flops_per_s
        rate = rates.get(dtype if format is None else format.arithmetic.format or dtype)
        if rate is None and format is not None and format.arithmetic.converted:
            rate = rates.get("bfloat16")
        return rate

    @classmethod
    def from_mapping(cls, name: str, mapping: Mapping[str, Any]) -> "HardwareSpec":
        """Read the tables of a system file, in which each constant is { value = ..., source = "..." }.

        Raises UserError (code "invalid_system") for a key that is unknown, missing or without a source, and for a
        value out of its range.
        """
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        for key, value, source in _constants(name, mapping):
            if key in _GONE:
                continue
            if key not in _KINDS:
                raise _invalid(f"the system {name} sets {key!r}, which is not known: use one of {', '.join(_KINDS)}")
            holds, words = _KINDS[key]
            if not holds(value):
                raise _invalid(f"the system {name} has {key} = {value!r}: set it to {words}")
            values[key], sources[key] = value, source
        for key, value in _ASSUMED.items():
            if key not in values:
                values[key], sources[key] = value, "assumed: the system file does not set it"
        return cls._of(name, values, sources)

    @property
    def constants(self) -> dict[str, Any]:
        """The value of every constant by dotted name, in the order of `sources`."""
        values = self._values()
        return {key: values[key] for key in self.sources}

    def replaced(self, values: Mapping[str, Any], source: str) -> "HardwareSpec":
        """Return the system with other values, by dotted name, which all come from `source`."""
        sources = {**self.sources, **dict.fromkeys(values, source)}
        return self._of(self.name, {**self.constants, **values}, sources)

    def of_machines(self, count: float) -> "HardwareSpec":
        """Return the system of ranks that share `count` such machines: rates, memory and cores are multiplied."""
        rates = [f"flops_per_s.{dtype}" for dtype in self.arithmetic.flops_per_s]
        scaled = ("memory_bytes_per_s", "memory_bytes", "reserve_bytes", "swap_bytes_per_s", *rates)
        known = self._values()
        values = {name: count * known[name] for name in scaled}
        return self.replaced({**values, "cores": max(round(count * self.cores), 1)}, f"{count:g} machines")

    def _values(self) -> dict[str, Any]:
        """Return the value of every constant by its name in system files."""
        memory, arithmetic, network, fixed = self.memory, self.arithmetic, self.network, self.fixed
        return {
            "memory_bytes_per_s": memory.bytes_per_s,
            "memory_bytes": memory.size_bytes,
            "reserve_bytes": memory.reserve_bytes,
            "memory_efficiency": memory.efficiency,
            "swap_bytes_per_s": memory.swap_bytes_per_s,
            **{f"flops_per_s.{dtype}": rate for dtype, rate in arithmetic.flops_per_s.items()},
            "compute_efficiency": arithmetic.efficiency,
            "attention_efficiency": arithmetic.attention_efficiency,
            "node_ranks": network.node_ranks,
            **{f"scale_up.{name}": value for name, value in vars(network.scale_up).items()},
            **{f"scale_out.{name}": value for name, value in vars(network.scale_out).items()},
            "in_switch_reduction": network.in_switch_reduction,
            "kernel_s": fixed.kernel_s,
            "collective_s": fixed.collective_s,
            "step_s": fixed.step_s,
            "part_s": fixed.part_s,
            "part_fixed_share": fixed.part_share,
            "shared": self.shared,
            "cores": self.cores,
        }

    @classmethod
    def _of(cls, name: str, values: Mapping[str, Any], sources: Mapping[str, str]) -> "HardwareSpec":
        """Make a system from values by dotted name. Raises UserError if one is missing, or if no memory is left."""
        rates = {dtype: values.get(f"flops_per_s.{dtype}") for dtype in FORMATS}
        flops_per_s = {dtype: rate for dtype, rate in rates.items() if rate is not None}
        missing = [key for key in _KINDS if key not in values and not key.startswith("flops_per_s.")]
        if missing or not flops_per_s:
            key = missing[0] if missing else "flops_per_s.bfloat16"
            raise _invalid(f'the system {name} has no {key}: set {key} = {{ value = ..., source = "..." }}')
        if values["reserve_bytes"] >= values["memory_bytes"]:
            raise _invalid(
                f"the system {name} has reserve_bytes = {values['reserve_bytes']!r}, which leaves no memory: set it "
                f"below memory_bytes, {values['memory_bytes']!r}"
            )
        return cls(
            name=name,
            memory=MemorySpec(
                size_bytes=values["memory_bytes"],
                reserve_bytes=values["reserve_bytes"],
                bytes_per_s=values["memory_bytes_per_s"],
                efficiency=values["memory_efficiency"],
                swap_bytes_per_s=values["swap_bytes_per_s"],
            ),
            arithmetic=ArithmeticSpec(
                flops_per_s=flops_per_s,
                efficiency=values["compute_efficiency"],
                attention_efficiency=values["attention_efficiency"],
            ),
            network=NetworkSpec(
                node_ranks=values["node_ranks"],
                scale_up=_link(values, "scale_up"),
                scale_out=_link(values, "scale_out"),
                in_switch_reduction=values["in_switch_reduction"],
            ),
            fixed=FixedCosts(
                kernel_s=values["kernel_s"],
                collective_s=values["collective_s"],
                step_s=values["step_s"],
                part_s=values["part_s"],
                part_share=values["part_fixed_share"],
            ),
            shared=values["shared"],
            cores=values["cores"],
            sources=sources,
        )


def _link(values: Mapping[str, Any], level: str) -> Link:
    return Link(values[f"{level}.latency_s"], values[f"{level}.bytes_per_s"], values[f"{level}.ranks"])


def _invalid(message: str) -> UserError:
    return UserError(message, "invalid_system")


def _constants(name: str, table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield dotted name, value and source of every constant in a table and its subtables."""
    for key, entry in table.items():
        dotted = prefix + key
        if isinstance(entry, Mapping) and not {"value", "source"} & set(entry):
            yield from _constants(name, entry, dotted + ".")
        elif isinstance(entry, Mapping) and set(entry) == {"value", "source"} and _is_text(entry["source"]):
            yield dotted, entry["value"], entry["source"]
        else:
            raise _invalid(
                f"the system {name} has {dotted} in a form other than a value and its source: set {dotted} = "
                '{ value = ..., source = "..." }'
            )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


_RATE = (lambda value: _is_number(value) and value > 0, "a number above 0")
_SIZE = (lambda value: _is_number(value) and value >= 0, "a number of bytes, 0 or more")
_TIME = (lambda value: _is_number(value) and value >= 0, "seconds, 0 or more")
_SHARE = (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1")
_REACHED = (lambda value: _is_number(value) and 0 < value <= 1, "a number above 0, at most 1")
_RANKS = (lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 1, "an integer above 0")
_FLAG = (lambda value: isinstance(value, bool), "true or false")

# Values of constants that older system files do not have. Without `reserve_bytes`, `memory_bytes` was usable memory. A
# server of one rank allows any number of ranks, and with this many cores ranks never take turns.
_ASSUMED: Mapping[str, float] = {
    "part_s": 0.0,
    "swap_bytes_per_s": 1e9,
    "reserve_bytes": 0.0,
    "node_ranks": 1,
    "cores": 2**20,
}

# Keys of older system files that are ignored.
_GONE = ("cache_bytes", "prefetch")

_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "memory_bytes_per_s": _RATE,
    "memory_bytes": _RATE,
    "reserve_bytes": _SIZE,
    **{f"flops_per_s.{dtype}": _RATE for dtype in FORMATS},
    "memory_efficiency": _REACHED,
    "compute_efficiency": _REACHED,
    "attention_efficiency": _REACHED,
    "kernel_s": _TIME,
    "collective_s": _TIME,
    "step_s": _TIME,
    "part_fixed_share": _SHARE,
    "part_s": _TIME,
    "swap_bytes_per_s": _RATE,
    "in_switch_reduction": _FLAG,
    "shared": _FLAG,
    "cores": _RANKS,
    "node_ranks": _RANKS,
    "scale_up.latency_s": _TIME,
    "scale_up.bytes_per_s": _RATE,
    "scale_up.ranks": _RANKS,
    "scale_out.latency_s": _TIME,
    "scale_out.bytes_per_s": _RATE,
    "scale_out.ranks": _RANKS,
}
