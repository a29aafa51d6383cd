"""Number formats: how numbers are stored, and the sizes of stored numbers.

A format stores weights, keys and values, or both, in some arrangements (`compute/kernels/weight.py`,
`compute/kernels/layer.py`). To add a format, add it to `FORMATS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from longhelix.errors import UserError


@dataclass(frozen=True)
class Scales:
    """The scale and offset that neighbouring numbers share: number = scale * stored + offset.

    Attributes:
        scale_bits: Bits of a scale.
        offset_bits: Bits of an offset.
        numbers: How many numbers share a scale. None: all numbers of a vector, which is one token's key or value of one
            head, or one output's weights.
    """

    scale_bits: int
    offset_bits: int = 0
    numbers: int | None = None

    @property
    def bits(self) -> int:
        """Bits of a scale and its offset."""
        return self.scale_bits + self.offset_bits


UNSCALED = Scales(0)


@dataclass(frozen=True, eq=False)
class NumberFormat:
    """How a number is stored. A format without `weights` and `kv` is only for planning.

    Attributes:
        name: Its name.
        bits: Bits of a number, without its share of a scale.
        activation: Whether the engine can compute in it.
        weights: Arrangements in which the engine keeps weights.
        weight_scales: Scales of weights. For planning-only formats, also of keys and values.
        kv: Arrangements in which the engine keeps keys and values, with the scales of each.
        arithmetic: The format whose arithmetic products use. Empty: its own.
        converted: Products convert it to bfloat16 as they read it, if the hardware has no arithmetic in it.
        rounds_inputs: Products round their inputs to bytes, with a scale for each 64 in a row, and multiply integers.
    """

    name: str
    bits: int
    activation: bool = False
    weights: tuple[str, ...] = ()
    weight_scales: Scales = UNSCALED
    kv: Mapping[str, Scales] = field(default_factory=dict)
    arithmetic: str = ""
    converted: bool = False
    rounds_inputs: bool = False

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight's number, with its share of a scale and an offset. Scales of whole vectors are left out."""
        numbers = self.weight_scales.numbers
        return (self.bits + (self.weight_scales.bits / numbers if numbers else 0)) / 8

    def weight_row_bytes(self, depth: int) -> int:
        """Return bytes of the weights of one output with `depth` inputs."""
        return int(depth * self.weight_bytes) + (0 if self.weight_scales.numbers else self.weight_scales.bits // 8)

    def kv_scales(self, device: str) -> Scales:
        """Return the scales of keys and values on "cpu" or "cuda". CPUs use tiles if the format has them, else rows."""
        arrangements = ("tiles", "rows") if device == "cpu" else ("rows",)
        planned = UNSCALED if self.kv or self.weights else self.weight_scales
        return next((self.kv[name] for name in arrangements if name in self.kv), planned)

    def vector_bits(self, size: int, scales: Scales) -> int:
        """Return bits of one token's key or value of one head with `size` channels."""
        return size * self.bits + scales.bits * (-(-size // scales.numbers) if scales.numbers else 1)


_PLAIN_WEIGHTS, _PLAIN_KV = ("plain", "panels"), {"rows": UNSCALED, "tiles": UNSCALED}
_WEIGHT_BLOCK = Scales(scale_bits=16, offset_bits=16, numbers=32)
_KV_ROW, _KV_TILE = Scales(scale_bits=32), Scales(scale_bits=16)

_KNOWN = (
    NumberFormat("float32", 32, activation=True, weights=_PLAIN_WEIGHTS, kv=_PLAIN_KV),
    NumberFormat("bfloat16", 16, activation=True, weights=_PLAIN_WEIGHTS, kv=_PLAIN_KV),
    NumberFormat("float16", 16, activation=True, weights=_PLAIN_WEIGHTS, kv=_PLAIN_KV),
    NumberFormat("fp8", 8, kv={"rows": _KV_ROW, "tiles": _KV_TILE}),
    NumberFormat(
        "int8",
        8,
        weights=("panels",),
        weight_scales=_WEIGHT_BLOCK,
        kv={"rows": _KV_ROW, "tiles": _KV_TILE},
        converted=True,
    ),
    NumberFormat("int4", 4, weights=("panels",), weight_scales=_WEIGHT_BLOCK, kv={"tiles": _KV_TILE}, converted=True),
    NumberFormat("w8a8", 8, weights=("panels",), weight_scales=Scales(scale_bits=32), rounds_inputs=True),
    # Without scales, as papers count it.
    NumberFormat("fp4", 4),
    # nvfp4 has a scale in fp8 for 16 numbers (NVIDIA), mxfp4 an exponent for 32 (OCP Microscaling Formats, 1.0).
    NumberFormat("nvfp4", 4, weight_scales=Scales(8, numbers=16), arithmetic="fp4", converted=True),
    NumberFormat("mxfp4", 4, weight_scales=Scales(8, numbers=32), arithmetic="fp4", converted=True),
)
FORMATS: Mapping[str, NumberFormat] = {format.name: format for format in _KNOWN}

# The engine's choices.
DTYPES = tuple(format.name for format in _KNOWN if format.activation)
WEIGHT_DTYPES = tuple(format.name for format in _KNOWN if format.weights and not format.rounds_inputs)
KV_DTYPES = tuple(format.name for format in _KNOWN if format.kv)


def product_dtype(weight_dtype: str, activation_dtype: str | None) -> str:
    """Return the format in which products keep weights.

    Args:
        weight_dtype: The format of the weights.
        activation_dtype: int8 if products round their inputs to it, otherwise None.
    """
    return weight_dtype if activation_dtype is None else "w8a8"


def number_format(name: str, what: str = "the number format") -> NumberFormat:
    """Return the format of a name. Raises UserError if there is none. what: how the error calls the name."""
    if name not in FORMATS:
        raise UserError(f"{what} {name!r} is not known: use one of {', '.join(FORMATS)}", "unsupported_dtype")
    return FORMATS[name]
