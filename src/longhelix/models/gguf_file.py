"""What a GGUF file says before its tensors' bytes: metadata, and the tensors' names, shapes, types and places.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf package's own reader makes two arrays of
every string, which takes seconds for a vocabulary; here they are read in bulk.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True, eq=False)
class GgufTensor:
    """A tensor as it is stored. `shape` in numpy's order; `data`: its bytes, mapped, (*shape[:-1], bytes of a row)."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray


class GgufFile:
    """A little-endian GGUF file, mapped. Raises OSError, and ValueError, which says what is not sound in it."""

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, np.uint8, "r")
        self._view = memoryview(self._bytes)
        self._at = 0
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._number("<I")
        if version & 0xFFFF == 0:
            raise ValueError("it is big-endian, and should be little-endian")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}, not one of {_VERSIONS}")
        num_tensors, num_fields = self._number("<Q"), self._number("<Q")
        self.metadata: Mapping[str, Any] = self._fields(num_fields)
        self.tensors: Mapping[str, GgufTensor] = self._tensors(num_tensors)

    def _fields(self, count: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(count):
            name = self._string()
            if name in found:
                raise ValueError(f"{name} is there twice")
            found[name] = self._value(self._number("<I"))
        return found

    def _value(self, kind: int) -> Any:
        """The next value, of a type that the format gives this number; arrays as lists."""
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            return self._scalars(kind, 1)[0]
        kind, count = self._number("<I"), self._number("<Q")
        if kind == GGUFValueType.STRING:
            return self._strings(count)
        if kind == GGUFValueType.ARRAY:
            return [self._value(kind) for _ in range(count)]
        return self._scalars(kind, count)

    def _scalars(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(_SCALARS[GGUFValueType(kind)])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        length_at, view, at, found = struct.Struct("<Q").unpack_from, self._view, self._at, []
        try:
            for _ in range(count):
                begin = at + 8
                at = begin + length_at(view, at)[0]
                found.append(str(view[begin:at], "utf-8"))
        except struct.error:
            at = len(view) + 1
        self._at = at
        self._check_end(at)
        return found

    def _tensors(self, count: int) -> dict[str, GgufTensor]:
        declared = {}
        for _ in range(count):
            name = self._string()
            if name in declared:
                raise ValueError(f"tensor {name} is there twice")
            shape = tuple(reversed(self._scalars(GGUFValueType.UINT64, self._number("<I"))))
            declared[name] = shape, GGMLQuantizationType(self._number("<I")), self._number("<Q")
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment}, not a power of two")
        start = -(-self._at // alignment) * alignment
        return {name: self._tensor(name, shape, kind, start + at) for name, (shape, kind, at) in declared.items()}

    def _tensor(self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, begin: int) -> GgufTensor:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if not shape or shape[-1] % block:
            raise ValueError(f"tensor {name} has shape {list(shape)}, whose rows are not whole blocks of {kind.name}")
        stored = *shape[:-1], shape[-1] // block * block_bytes
        end = begin + prod(stored)
        self._check_end(end)
        return GgufTensor(name, shape, kind, self._bytes[begin:end].reshape(stored))

    def _number(self, format: str) -> int:
        return struct.unpack(format, self._take(struct.calcsize(format)))[0]

    def _take(self, size: int) -> memoryview:
        begin, self._at = self._at, self._at + size
        self._check_end(self._at)
        return self._view[begin : self._at]

    def _check_end(self, end: int) -> None:
        if end > len(self._view):
            raise ValueError(f"it ends at byte {len(self._view)}, but must go on")
