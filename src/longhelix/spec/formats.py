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
        offset_bits: Bits of an offset, or of a zero point.
        numbers: How many numbers share a scale. None: all numbers of a vector, which is one token's key or value of one
            head, or one output's weights.
        vector_bits: Bits of another scale for each vector, by which all of its numbers are multiplied.
    """

    scale_bits: int
    offset_bits: int = 0
    numbers: int | None = None
    vector_bits: int = 0

    @property
    def bits(self) -> int:
        """Bits of a scale and its offset."""
        return self.scale_bits + self.offset_bits


UNSCALED = Scales(0)


@dataclass(frozen=True)
class Codes:
    """How checkpoints store a packed weight: a code for each number, and scales for blocks of numbers.

    number = (value of the code - zero point) * scale * scale of the output, with whatever of these there is.

    Attributes:
        element: What a code stands for. "e4m3" and "e2m1" are floats (OCP), "int8" is an integer in two's complement,
            and "uint4" is an integer from 0 to 15.
        scale: The dtype of a scale. "e8m0" is a power of two (OCP).
        zero_points: Each scale block has a zero point of a byte. Otherwise, that of "uint4" is 8, and others have none.
    """

    element: str
    scale: str
    zero_points: bool = False


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic that computes with numbers of a format.

    Attributes:
        activation: Whether the engine can compute in the format.
        format: The format whose arithmetic products use. Empty: its own.
        converted: Products convert it to bfloat16 as they read it, if the hardware has no arithmetic in it.
    """

    activation: bool = False
    format: str = ""
    converted: bool = False


@dataclass(frozen=True, eq=False)
class NumberFormat:
    """How a number is stored. A format without `weights` and `kv` is only for planning.

    Attributes:
        name: Its name.
        bits: Bits of a number, without its share of a scale.
        weights: Arrangements in which the engine keeps weights.
        weight_scales: Scales of weights. For planning-only formats, also of keys and values.
        kv: Arrangements in which the engine keeps keys and values, with the scales of each.
        arithmetic: The arithmetic that computes with it.
        rounds_inputs: Products round their inputs to bytes, with a scale for each 64 in a row, and multiply integers.
        codes: How checkpoints store weights of this format. None: as numbers without scales, or not at all.
    """

    name: str
    bits: int
    weights: tuple[str, ...] = ()
    weight_scales: Scales = UNSCALED
    kv: Mapping[str, Scales] = field(default_factory=dict)
    arithmetic: Arithmetic = Arithmetic()
    rounds_inputs: bool = False
    codes: Codes | None = None

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight's number, with its share of a scale and an offset. Scales of whole vectors are left out."""
        numbers = self.weight_scales.numbers
        return (self.bits + (self.weight_scales.bits / numbers if numbers else 0)) / 8

    def weight_row_bytes(self, depth: int, lead: int = 0) -> int:
        """Return bytes of the weights of one output with `depth` inputs.

        lead: how many inputs of the first scale block belong to another rank. Both ranks keep the block's scale.
        """
        blocks, scales = self.scale_blocks(depth, lead), self.weight_scales
        return (depth * self.bits + 7) // 8 + (blocks * scales.bits + scales.vector_bits) // 8

    def scale_blocks(self, depth: int, lead: int = 0) -> int:
        """Return the number of scale blocks of an output. depth, lead: see `weight_row_bytes`."""
        numbers = self.weight_scales.numbers
        return 1 if numbers is None else (lead + depth + numbers - 1) // numbers

    def kv_scales(self, device: str) -> Scales:
        """Return the scales of keys and values on "cpu" or "cuda". CPUs use tiles if the format has them, else rows."""
        arrangements = ("tiles", "rows") if device == "cpu" else ("rows",)
        planned = UNSCALED if self.kv or (self.weights and self.codes is None) else self.weight_scales
        return next((self.kv[name] for name in arrangements if name in self.kv), planned)

    def vector_bits(self, size: int, scales: Scales) -> int:
        """Return bits of one token's key or value of one head with `size` channels."""
        return size * self.bits + scales.bits * (-(-size // scales.numbers) if scales.numbers else 1)


_PLAIN_WEIGHTS, _PLAIN_KV = ("plain", "panels"), {"rows": UNSCALED, "tiles": UNSCALED}
_WEIGHT_BLOCK = Scales(scale_bits=16, offset_bits=16, numbers=32)
_ACTIVATION, _CONVERTED = Arithmetic(activation=True), Arithmetic(converted=True)
_KV_ROW, _KV_TILE = Scales(scale_bits=32), Scales(scale_bits=16)


def _packed(
    name: str, bits: int, codes: Codes, numbers: int | None, arithmetic: str = "", vector_bits: int = 0
) -> NumberFormat:
    """Return a format in which checkpoints store weights, and in which weights stay packed.

    numbers: How many numbers share a scale. None: all weights of an output.
    """
    scales = Scales(_SCALE_BITS[codes.scale], 8 if codes.zero_points else 0, numbers, vector_bits)
    return NumberFormat(
        name,
        bits,
        weights=("packed", "panels"),
        weight_scales=scales,
        arithmetic=Arithmetic(format=arithmetic, converted=True),
        codes=codes,
    )


_SCALE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "e4m3": 8, "e8m0": 8}
# Integers in groups: scales have the dtype of the model.
_GROUPS = tuple(
    _packed(
        f"int4-g{numbers}{'' if scale == 'bfloat16' else '-' + scale}{'-zero' if zero_points else ''}",
        4,
        Codes("uint4", scale, zero_points),
        numbers,
        arithmetic="int4",
    )
    for numbers in (32, 64, 128)
    for scale in ("bfloat16", "float16")
    for zero_points in (False, True)
)

_KNOWN = (
    NumberFormat("float32", 32, weights=_PLAIN_WEIGHTS, kv=_PLAIN_KV, arithmetic=_ACTIVATION),
    NumberFormat("bfloat16", 16, weights=_PLAIN_WEIGHTS, kv=_PLAIN_KV, arithmetic=_ACTIVATION),
    NumberFormat("float16", 16, weights=_PLAIN_WEIGHTS, kv=_PLAIN_KV, arithmetic=_ACTIVATION),
    NumberFormat("fp8", 8, kv={"rows": _KV_ROW, "tiles": _KV_TILE}),
    NumberFormat(
        "int8",
        8,
        weights=("panels",),
        weight_scales=_WEIGHT_BLOCK,
        kv={"rows": _KV_ROW, "tiles": _KV_TILE},
        arithmetic=_CONVERTED,
    ),
    NumberFormat(
        "int4", 4, weights=("panels",), weight_scales=_WEIGHT_BLOCK, kv={"tiles": _KV_TILE}, arithmetic=_CONVERTED
    ),
    NumberFormat("w8a8", 8, weights=("panels",), weight_scales=Scales(scale_bits=32), rounds_inputs=True),
    # Without scales, as papers count it.
    NumberFormat("fp4", 4),
    # A scale in fp8 for 16 numbers and a float32 scale for the tensor (NVIDIA). Each output keeps a copy of the latter.
    _packed("nvfp4", 4, Codes("e2m1", "e4m3"), 16, arithmetic="fp4", vector_bits=32),
    # An exponent for 32 numbers (OCP Microscaling Formats, 1.0).
    _packed("mxfp4", 4, Codes("e2m1", "e8m0"), 32, arithmetic="fp4"),
    _packed("mxfp8", 8, Codes("e4m3", "e8m0"), 32, arithmetic="fp8"),
    # Scale blocks of 128 x 128 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). Each output keeps a copy of its scales.
    _packed("fp8-block", 8, Codes("e4m3", "float32"), 128, arithmetic="fp8"),
    _packed("fp8-channel", 8, Codes("e4m3", "float32"), None, arithmetic="fp8"),
    _packed("int8-channel", 8, Codes("int8", "float32"), None, arithmetic="int8"),
    *_GROUPS,
)
FORMATS: Mapping[str, NumberFormat] = {format.name: format for format in _KNOWN}

# The engine's choices.
DTYPES = tuple(format.name for format in _KNOWN if format.arithmetic.activation)
_QUANTISED_TO = ("fp8-block", "int4-g128", "nvfp4")  # packed formats in which the engine can quantise while loading
WEIGHT_DTYPES = (
    *(format.name for format in _KNOWN if format.weights and not format.rounds_inputs and format.codes is None),
    *_QUANTISED_TO,
)
KV_DTYPES = tuple(format.name for format in _KNOWN if format.kv)
# To which products may round their inputs, with the packed formats that weights must then have.
ACTIVATION_DTYPES: Mapping[str, tuple[str, ...]] = {"int8": ("int8-channel",), "fp8": ("fp8-block", "fp8-channel")}


def product_dtype(weight_dtype: str, activation_dtype: str | None) -> str:
    """Return the format in which products keep weights that the checkpoint does not pack.

    Args:
        weight_dtype: The format of these weights.
        activation_dtype: The format to which products round their inputs. None: they do not.
    """
    return "w8a8" if activation_dtype == weight_dtype == "int8" else weight_dtype


def number_format(name: str, what: str = "the number format") -> NumberFormat:
    """Return the format of a name. Raises UserError if there is none. what: how the error calls the name."""
    if name not in FORMATS:
        raise UserError(f"{what} {name!r} is not known: use one of {', '.join(FORMATS)}", "unsupported_dtype")
    return FORMATS[name]
