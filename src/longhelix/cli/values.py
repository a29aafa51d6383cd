"""Parse command-line values: sizes and times with units, flags, and the tied layout."""

import re
from fractions import Fraction
from typing import Annotated, Any

from cyclopts import Parameter, Token

from longhelix.errors import UserError
from longhelix.spec.layout import Layout

_SIZE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
_TIME_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}


def size(type_: Any, tokens: tuple[Token, ...]) -> int:
    """Convert a command-line token to a size."""
    return parse_size(tokens[0].value)


def parse_size(text: str) -> int:
    """Parse an integer with an optional unit: k, M and G are decimal; Ki, Mi and Gi are binary. Raises ValueError."""
    # Use fractions, because floats are not exact above 2**53. Valid sizes have at most 18 digits.
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)((?:[kKmMgG]i?)?)", text)
    number = Fraction(match[1]) * _SIZE_UNITS[match[2].lower()] if match else None
    if number is None or number.denominator != 1:
        raise ValueError(f'"{text}" is not a size: give an integer such as 4096, 128k or 64Ki')
    return int(number)


def size_or_auto(type_: Any, tokens: tuple[Token, ...]) -> int | str:
    """Convert a command-line token to a size, or to "auto"."""
    return "auto" if tokens[0].value == "auto" else size(type_, tokens)


def seconds(type_: Any, tokens: tuple[Token, ...]) -> float:
    """Convert a command-line token with a unit (us, ms, s or min) to seconds."""
    text = tokens[0].value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s|min)", text)
    if match is None:
        raise ValueError(f'"{text}" is not a time: give a number with a unit, such as 20ms or 30s')
    return float(match[1]) * _TIME_UNITS_S[match[2]]


def tied_layout(kvp: int = 1, tpa: int = 1, tpf: int | None = None, ep: int = 1, pp: int = 1) -> Layout:
    """Create the layout of --tied: TPF = TPA, and KVP copies of the FFN. Raises UserError for other FFN degrees."""
    if ep != 1 or tpf not in (None, tpa):
        raise UserError(
            f"--tied fixes tpf = tpa = {tpa} and ep = 1, but other values are set: leave out --tpf and --ep",
            "invalid_layout",
        )
    return Layout(kvp=kvp, tpa=tpa, tpf=tpa, ep=1, pp=pp, ffn_replicas=kvp)


Size = Annotated[int, Parameter(converter=size, negative=())]
SizeOrAuto = Annotated[int | str, Parameter(converter=size_or_auto, negative=())]
Seconds = Annotated[float, Parameter(converter=seconds, negative=())]
Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
