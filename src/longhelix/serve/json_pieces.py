"""Encodes JSON in small pieces, so that memory never contains the complete text of a long answer."""

from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

_PART = 1 << 16  # maximum number of characters of a string in a piece
_FEW = 1 << 10  # maximum number of items of a list in a piece


def json_pieces(value: Any) -> Iterator[bytes]:
    """Encode a value as JSON.

    Args:
        value: anything that msgspec encodes. An iterator becomes a list, one item at a time. Long strings must be
            values of a mapping or items of an iterator, because only these are split.
    """
    if isinstance(value, Mapping):
        yield b"{"
        for place, (name, inner) in enumerate(value.items()):
            yield (b"," if place else b"") + msgspec.json.encode(name) + b":"
            yield from json_pieces(inner)
        yield b"}"
    elif isinstance(value, Iterator):
        yield b"["
        for place, inner in enumerate(value):
            if place:
                yield b","
            yield from json_pieces(inner)
        yield b"]"
    elif isinstance(value, str):
        yield b'"'
        for start in range(0, len(value), _PART):
            yield msgspec.json.encode(value[start : start + _PART])[1:-1]
        yield b'"'
    elif isinstance(value, (list, array)):
        yield b"["
        for start in range(0, len(value), _FEW):
            part = value[start : start + _FEW]
            encoded = msgspec.json.encode(part.tolist() if isinstance(part, array) else part)
            yield (b"," if start else b"") + encoded[1:-1]
        yield b"]"
    else:
        yield msgspec.json.encode(value)
