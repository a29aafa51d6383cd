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
class HardwareSpec:
    """One GPU of a system, and its links to other GPUs, in seconds, bytes and operations.

    Attributes:
        name: Name of the system.
        memory_bytes_per_s: Memory bandwidth.
        memory_bytes: All memory.
        reserve_bytes: Memory of the driver, contexts, communication buffers, graphs and fragments.
        flops_per_s: Peak dense operations per second, by dtype.
        node_ranks: Ranks of one server or tray.
        scale_up: The closest domain of ranks: one server or several.
        scale_out: The network beyond it. Its `ranks` is the largest possible number.
        in_switch_reduction: The switches of `scale_up` can add up (NVLink SHARP).
        kernel_s: Fixed cost of every kernel.
        collective_s: Fixed cost of every collective, without the latency of its link.
        step_s: Fixed cost of every step in each pipeline stage (scheduling and sampling on its host).
        memory_efficiency: Fraction of `memory_bytes_per_s` that kernels reach.
        compute_efficiency: Fraction of `flops_per_s` that kernels reach.
        attention_efficiency: Fraction of `flops_per_s` that attention reaches.
        part_fixed_share: Share of an exchange's fixed cost that each of its parts pays again (HOP-B). 0: the parts
            divide it, as in Figure 3 of arXiv 2507.07120. 1: each part is a collective of its own.
        part_s: Fixed cost of a part's attention besides its kernels: to cut, pack, start and merge it.
        swap_bytes_per_s: Bandwidth of swapped KV, which is in the host's memory or on a disk.
        shared: Ranks are processes of one machine, so each of N ranks has 1/N of its bandwidth and arithmetic. For
            several such machines, see `of_machines`. Each is a scale_up domain.
        cores: Cores of that machine. If there are more ranks, they take turns.
        sources: The source of each number, by dotted name ("scale_up.latency_s").
    """

    name: str
    memory_bytes_per_s: float
    memory_bytes: float
    reserve_bytes: float
    flops_per_s: Mapping[str, float] = field(hash=False)
    node_ranks: int
    scale_up: Link
    scale_out: Link
    in_switch_reduction: bool
    kernel_s: float
    collective_s: float
    step_s: float
    memory_efficiency: float
    compute_efficiency: float
    attention_efficiency: float
    part_fixed_share: float
    part_s: float
    swap_bytes_per_s: float
    shared: bool
    cores: int
    sources: Mapping[str, str] = field(compare=False, repr=False)

    @property
    def usable_bytes(self) -> float:
        """Memory that weights, KV and steps may fill."""
        return self.memory_bytes - self.reserve_bytes

    def computes_in(self, dtype: str) -> bool:
        """Return whether the hardware can compute products in `dtype`, if necessary in bfloat16."""
        return self._rate(dtype) is not None

    def rate(self, dtype: str) -> float:
        """Return peak dense operations per second of products in `dtype`. Raises UserError if there are none."""
        rate = self._rate(dtype)
        if rate is None:
            raise UserError(
                f"the system {self.name} has no arithmetic in {dtype}: use one of {', '.join(self.flops_per_s)}",
                "unsupported_dtype",
            )
        return rate

    def _rate(self, dtype: str) -> float | None:
        format = FORMATS.get(dtype)
        rate = self.flops_per_s.get(dtype if format is None else format.arithmetic or dtype)
        if rate is None and format is not None and format.converted:
            rate = self.flops_per_s.get("bfloat16")
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
        return {key: self._value(key) for key in self.sources}

    def replaced(self, values: Mapping[str, Any], source: str) -> "HardwareSpec":
        """Return the system with other values, by dotted name, which all come from `source`."""
        sources = {**self.sources, **dict.fromkeys(values, source)}
        return self._of(self.name, {**self.constants, **values}, sources)

    def of_machines(self, count: float) -> "HardwareSpec":
        """Return the system of ranks that share `count` such machines: rates, memory and cores are multiplied."""
        scaled = (
            "memory_bytes_per_s",
            "memory_bytes",
            "reserve_bytes",
            "swap_bytes_per_s",
            *(f"flops_per_s.{dtype}" for dtype in self.flops_per_s),
        )
        values = {name: count * self._value(name) for name in scaled}
        return self.replaced({**values, "cores": max(round(count * self.cores), 1)}, f"{count:g} machines")

    def _value(self, key: str) -> Any:
        table, _, name = key.rpartition(".")
        if table == "flops_per_s":
            return self.flops_per_s[name]
        return getattr(getattr(self, table) if table else self, name)

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
        plain = {key: value for key, value in values.items() if "." not in key}
        return cls(
            name=name,
            flops_per_s=flops_per_s,
            scale_up=_link(values, "scale_up"),
            scale_out=_link(values, "scale_out"),
            sources=sources,
            **plain,
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
