"""Number formats: how numbers are stored, and the sizes of stored numbers.

A format stores weights, keys and values, or both, in some arrangements (`compute/kernels/weight.py`,
`compute/kernels/layer.py`). To add a format, add it to `FORMATS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
        superblock: How many numbers share another scale and offset, by which those of their blocks are multiplied.
            A superblock consists of whole blocks. None: there are no superblocks.
        superblock_bits: Bits of these.
    """

    scale_bits: int
    offset_bits: int = 0
    numbers: int | None = None
    vector_bits: int = 0
    superblock: int | None = None
    superblock_bits: int = 0

    @property
    def bits(self) -> int:
        """Bits of a scale and its offset."""
        return self.scale_bits + self.offset_bits

    def lead(self, first: int) -> int:
        """Return how many numbers of the block or superblock that has the number `first` are before it."""
        whole = self.superblock or self.numbers
        return 0 if whole is None else first % whole

    def num_blocks(self, size: int, lead: int = 0) -> int:
        """Return the number of blocks that `size` numbers of a vector touch. lead: see `lead`."""
        return 1 if self.numbers is None else -(-(lead % self.numbers + size) // self.numbers)

    def num_superblocks(self, size: int, lead: int = 0) -> int:
        """Return the number of superblocks that `size` numbers of a vector touch. lead: see `lead`."""
        return 0 if self.superblock is None else -(-(lead + size) // self.superblock)


UNSCALED = Scales(0)


@dataclass(frozen=True)
class Codes:
    """How checkpoints store a packed weight: a code for each number, and scales for blocks of numbers.

    number = (value of the code - zero point) * scale * scale of the output + offset, with whatever of these there is.

    Attributes:
        element: What a code stands for. "e4m3" and "e2m1" are floats (OCP), "int8" is an integer in two's complement,
            "uint4" is an integer from 0 to 15, "uint6" one from 0 to 63, and "nl4" is one of sixteen integers
            (`NL4_VALUES`).
        scale: The dtype of a scale. "e8m0" is a power of two (OCP).
        zero_points: Each scale block has a zero point of a byte. Otherwise, it is `zero`.
        zero: The zero point of all blocks.
        offsets: Each scale block has an offset, in the dtype of scales.
        superblock: The dtype of a superblock's scale, and of its offset if blocks have offsets. Empty: there are none.
    """

    element: str
    scale: str
    zero_points: bool = False
    zero: int = 0
    offsets: bool = False
    superblock: str = ""


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic that computes with numbers of a format.

    Attributes:
        activation: Whether the engine can compute in the format.
        format: The format whose arithmetic products use. Empty: its own.
        converted: Products convert it to bfloat16 as they read it, if the hardware has no arithmetic in it.
        rounds_inputs: Products round their inputs to bytes, with a scale for each 64 in a row, and multiply integers.
    """

    activation: bool = False
    format: str = ""
    converted: bool = False
    rounds_inputs: bool = False


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
        rotates_keys: Keys are stored times an orthogonal matrix, and so are the queries that are multiplied by them
            (`compute/kernels/numbers.py`). Scores stay the same. Keys that are values as well are stored as they are.
        codes: How checkpoints store weights of this format. None: as numbers without scales, or not at all.
    """

    name: str
    bits: int
    weights: tuple[str, ...] = ()
    weight_scales: Scales = UNSCALED
    kv: Mapping[str, Scales] = field(default_factory=dict)
    arithmetic: Arithmetic = Arithmetic()
    rotates_keys: bool = False
    codes: Codes | None = None

    @property
    def weight_bytes(self) -> float:
        """Bytes of a weight's number, with its share of a scale and an offset. Scales of whole vectors are left out."""
        scales = self.weight_scales
        shared = (scales.bits, scales.numbers), (scales.superblock_bits, scales.superblock)
        return (self.bits + sum(bits / numbers for bits, numbers in shared if numbers)) / 8

    def weight_row_bytes(self, depth: int, lead: int = 0) -> int:
        """Return bytes of the weights of one output with `depth` inputs.

        lead: how many inputs of the first scale block or superblock belong to another rank. Both ranks keep its scale.
        """
        scales = self.weight_scales
        side_bits = scales.num_blocks(depth, lead) * scales.bits + scales.vector_bits
        side_bits += scales.num_superblocks(depth, lead) * scales.superblock_bits
        return self.code_bytes(depth) + side_bits // 8

    def code_bytes(self, size: int) -> int:
        """Return bytes of the codes of `size` numbers. Four codes of six bits take three bytes."""
        return -(-size // 4) * 3 if self.bits == 6 else (size * self.bits + 7) // 8

    def kv_scales(self, device: str) -> Scales:
        """Return the scales of keys and values on "cpu" or "cuda". CPUs use tiles if the format has them, else rows."""
        arrangements = ("tiles", "rows") if device == "cpu" else ("rows",)
        planned = UNSCALED if self.kv or (self.weights and self.codes is None) else self.weight_scales
        return next((self.kv[name] for name in arrangements if name in self.kv), planned)

    def vector_bits(self, size: int, scales: Scales) -> int:
        """Return bits of one token's key or value of one head with `size` channels."""
        return size * self.bits + scales.bits * scales.num_blocks(size) + scales.vector_bits


_PLAIN_WEIGHTS, _PLAIN_KV = ("plain", "panels"), {"rows": UNSCALED, "tiles": UNSCALED}
_WEIGHT_BLOCK = Scales(scale_bits=16, offset_bits=16, numbers=32)
_ACTIVATION, _CONVERTED = Arithmetic(activation=True), Arithmetic(converted=True)
_KV_ROW, _KV_TILE = Scales(scale_bits=32), Scales(scale_bits=16)
# A scale in fp8 for 16 channels, and a power of two for the vector. NVIDIA has a float32 scale for a tensor instead. It
# would have to be known before the first token is written. Powers of two leave numbers exact in bfloat16.
_KV_BLOCK = Scales(scale_bits=8, numbers=16, vector_bits=8)


def _packed(name: str, codes: Codes, numbers: int | None, arithmetic: str = "", vector_bits: int = 0) -> NumberFormat:
    """Return a format in which checkpoints store weights, and in which weights stay packed.

    numbers: How many numbers share a scale. None: all weights of an output.
    """
    scale_bits = SCALE_BITS[codes.scale]
    scales = Scales(scale_bits, 8 if codes.zero_points else scale_bits if codes.offsets else 0, numbers, vector_bits)
    if codes.superblock:
        superblock_bits = SCALE_BITS[codes.superblock] * (2 if codes.offsets else 1)
        scales = replace(scales, superblock=_SUPERBLOCK, superblock_bits=superblock_bits)
    return NumberFormat(
        name,
        _CODE_BITS[codes.element],
        weights=("packed", "panels"),
        weight_scales=scales,
        arithmetic=Arithmetic(format=arithmetic, converted=True),
        codes=codes,
    )


_CODE_BITS = {"e4m3": 8, "int8": 8, "uint6": 6, "e2m1": 4, "uint4": 4, "nl4": 4}
SCALE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "e4m3": 8, "e8m0": 8, "int8": 8}
_SUPERBLOCK = 256
# What the codes of "nl4" stand for (IQ4_NL and IQ4_XS of llama.cpp, kvalues_iq4nl in ggml-common.h).
NL4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Integers in groups: scales have the dtype of the model.
_GROUPS = tuple(
    _packed(
        f"int4-g{numbers}{'' if scale == 'bfloat16' else '-' + scale}{'-zero' if zero_points else ''}",
        Codes("uint4", scale, zero_points, zero=0 if zero_points else 8),
        numbers,
        arithmetic="int4",
    )
    for numbers in (32, 64, 128)
    for scale in ("bfloat16", "float16")
    for zero_points in (False, True)
)

# What GGUF files hold, block by block as they have it (docs: ggml-common.h of llama.cpp). Codes of five bits take six,
# and those of two and three bits take four. Q4_0 and MXFP4 are formats of other checkpoints as well.
_GGUF = (
    _packed("q8_0", Codes("int8", "float16"), 32, arithmetic="int8"),
    _packed("q4_1", Codes("uint4", "float16", offsets=True), 32, arithmetic="int4"),
    _packed("q5_0", Codes("uint6", "float16", zero=16), 32, arithmetic="int8"),
    _packed("q5_1", Codes("uint6", "float16", offsets=True), 32, arithmetic="int8"),
    _packed("q2_k", Codes("uint4", "int8", offsets=True, superblock="float16"), 16, arithmetic="int4"),
    _packed("q3_k", Codes("uint4", "int8", zero=4, superblock="float16"), 16, arithmetic="int4"),
    _packed("q4_k", Codes("uint4", "int8", offsets=True, superblock="float16"), 32, arithmetic="int4"),
    _packed("q5_k", Codes("uint6", "int8", offsets=True, superblock="float16"), 32, arithmetic="int8"),
    _packed("q6_k", Codes("uint6", "int8", zero=32, superblock="float16"), 16, arithmetic="int8"),
    _packed("iq4_nl", Codes("nl4", "float16"), 32, arithmetic="int4"),
    _packed("iq4_xs", Codes("nl4", "int8", superblock="float16"), 32, arithmetic="int4"),
    # Holds the numbers of any of the K-quants, for weights whose parts are stored as different ones.
    _packed("any_k", Codes("uint6", "int8", zero=32, offsets=True, superblock="float16"), 16, arithmetic="int8"),
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
        "int4",
        4,
        weights=("panels",),
        weight_scales=_WEIGHT_BLOCK,
        kv={"tiles": _KV_TILE},
        arithmetic=_CONVERTED,
        rotates_keys=True,
    ),
    NumberFormat(
        "w8a8",
        8,
        weights=("panels",),
        weight_scales=Scales(scale_bits=32),
        arithmetic=Arithmetic(rounds_inputs=True),
    ),
    # Without scales, as papers count it.
    NumberFormat("fp4", 4),
    # A scale in fp8 for 16 numbers and a float32 scale for the tensor (NVIDIA). Each output keeps a copy of the latter.
    replace(
        _packed("nvfp4", Codes("e2m1", "e4m3"), 16, arithmetic="fp4", vector_bits=32),
        kv={"rows": _KV_BLOCK, "tiles": _KV_BLOCK},
        rotates_keys=True,
    ),
    # An exponent for 32 numbers (OCP Microscaling Formats, 1.0).
    _packed("mxfp4", Codes("e2m1", "e8m0"), 32, arithmetic="fp4"),
    _packed("mxfp8", Codes("e4m3", "e8m0"), 32, arithmetic="fp8"),
    # Scale blocks of 128 x 128 (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). Each output keeps a copy of its scales.
    _packed("fp8-block", Codes("e4m3", "float32"), 128, arithmetic="fp8"),
    _packed("fp8-channel", Codes("e4m3", "float32"), None, arithmetic="fp8"),
    _packed("int8-channel", Codes("int8", "float32"), None, arithmetic="int8"),
    *_GROUPS,
    *_GGUF,
)
FORMATS: Mapping[str, NumberFormat] = {format.name: format for format in _KNOWN}

# The engine's choices.
DTYPES = tuple(format.name for format in _KNOWN if format.arithmetic.activation)
_QUANTISED_TO = ("fp8-block", "int4-g128", "nvfp4")  # packed formats in which the engine can quantise while loading
WEIGHT_DTYPES = (
    *(
        format.name
        for format in _KNOWN
        if format.weights and not format.arithmetic.rounds_inputs and format.codes is None
    ),
    *_QUANTISED_TO,
)
KV_DTYPES = tuple(format.name for format in _KNOWN if format.kv)
# To which products may round their inputs, with the packed formats that weights must then have. With int8, their codes
# stand for integers.
ACTIVATION_DTYPES: Mapping[str, tuple[str, ...]] = {
    "int8": tuple(format.name for format in _KNOWN if format.codes is not None and format.codes.element != "e4m3"),
    "fp8": ("fp8-block", "fp8-channel"),
}


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
