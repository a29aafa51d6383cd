"""Reads the headers of GGUF files: metadata, and the names, shapes, types and places of tensors.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The reader of the gguf package makes two
arrays of every string, which takes seconds for a vocabulary.
"""

import re
import struct
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from longhelix.compute.models.checkpoint import invalid_checkpoint
from longhelix.errors import UserError
from longhelix.values import shown

_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MOST_DIMS = 4
# As struct and array call them.
_NUMBERS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


# Names of the parts of a split model.
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, eq=False)
class GgufTensor:
    """A tensor as it is stored. `shape` in numpy's order; `data`: its bytes, mapped, (*shape[:-1], bytes of a row)."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray


@dataclass(frozen=True, eq=False)
class GgufModel:
    """The files of a model: one file, or all parts of a split one.

    Attributes:
        files: The files, in order.
        metadata: Values by key, from the first file.
        tensors: The tensors of all files by name.
    """

    files: tuple[Path, ...]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> "GgufModel":
        """Open a file and the other parts of its model. Raises UserError if one is missing, or of another model."""
        paths = part_paths(path)
        missing = [part for part in paths if not part.is_file()]
        if missing:
            raise invalid_checkpoint(
                f"{missing[0]} is missing, which is one of the {len(paths)} parts of a split model: download all parts "
                "into one folder."
            )
        files = [GgufFile(part) for part in paths]
        _check_parts(paths, files)
        tensors: dict[str, GgufTensor] = {}
        for part, file in zip(paths, files, strict=True):
            for name, tensor in file.tensors.items():
                if name in tensors:
                    raise _mixed(part, f"it has a tensor of an earlier part, {shown(name)}")
                tensors[name] = tensor
        total = files[0].metadata.get("split.tensors.count")
        if len(files) > 1 and total is not None and total != len(tensors):
            raise _mixed(paths[0], f"the parts have {len(tensors)} tensors, not {shown(total)}")
        return cls(tuple(paths), files[0].metadata, tensors)


def part_paths(path: Path) -> list[Path]:
    """Return the paths of all parts of the model that a file belongs to, in order, from its name."""
    match = _PART.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [path]
    return [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)]


class GgufFile:
    """A little-endian GGUF file, mapped. Raises UserError where it is not sound, or of a kind that is not read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._bytes = np.memmap(path, np.uint8, "r")
        except (OSError, ValueError) as error:  # a ValueError where it is empty
            raise self._unsound(str(error)) from error
        self._view = memoryview(self._bytes)
        self._at = 0
        if self._take(4) != b"GGUF":
            raise self._unsound("it does not begin with GGUF")
        stored = self._take(4)
        version = int.from_bytes(stored, "little")
        if version not in _VERSIONS:
            kind = "that is big-endian" if int.from_bytes(stored, "big") in _VERSIONS else f"of version {version}"
            raise invalid_checkpoint(
                f"{path} is a GGUF file {kind}: give a little-endian one of version {' or '.join(map(str, _VERSIONS))}."
            )
        num_tensors, num_fields = self._number("Q"), self._number("Q")
        self.metadata: Mapping[str, Any] = self._fields(num_fields)
        self.tensors: Mapping[str, GgufTensor] = self._tensors(num_tensors)

    def _fields(self, count: int) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for _ in range(count):
            name = self._name()
            if name in entries:
                raise self._unsound(f"{shown(name)} occurs twice")
            try:
                entries[name] = self._value(self._number("I"))
            except (MemoryError, RecursionError):
                raise self._unsound(f"{shown(name)} is too long or too deep") from None
        return entries

    def _value(self, kind: int) -> Any:
        """Read the next value, of the type with this number.

        Arrays of numbers stay packed, because lists would need up to 40 times the memory.
        """
        if kind == GGUFValueType.STRING:
            return self._strings(1)[0]
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != GGUFValueType.ARRAY:
            raise self._unsound(f"a value is of the unknown type {kind}")
        kind, count = self._number("I"), self._number("Q")
        if kind == GGUFValueType.STRING:
            return self._strings(count)
        code = _NUMBERS.get(kind)
        if code is None:
            return [self._value(kind) for _ in range(count)]
        data = self._take(count * struct.calcsize(f"<{code}"))
        return [byte != 0 for byte in data] if code == "?" else array(code, bytes(data))

    def _strings(self, count: int) -> list[str | bytes]:
        """Read strings. A string that is not UTF-8 becomes bytes, so it is an error only if someone reads it."""
        view, at, entries = self._view, self._at, list[str | bytes]()
        for _ in range(count):
            begin = at + 8
            at = begin + int.from_bytes(view[at:begin], "little")
            self._check_end(at)
            try:
                entries.append(str(view[begin:at], "utf-8"))
            except UnicodeDecodeError:
                entries.append(bytes(view[begin:at]))
        self._at = at
        return entries

    def _name(self) -> str:
        (name,) = self._strings(1)
        if isinstance(name, bytes):
            raise self._unsound(f"the name {shown(name)} is not UTF-8")
        return name

    def _tensors(self, count: int) -> dict[str, GgufTensor]:
        declared = {}
        for _ in range(count):
            name = self._name()
            if name in declared:
                raise self._unsound(f"tensor {shown(name)} occurs twice")
            num_dims = self._number("I")
            if not 1 <= num_dims <= _MOST_DIMS:
                raise self._unsound(f"tensor {shown(name)} has {num_dims} dims, not 1 to {_MOST_DIMS}")
            shape = tuple(self._number("Q") for _ in range(num_dims))[::-1]
            declared[name] = shape, self._number("I"), self._number("Q")
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._unsound(f"general.alignment is {shown(alignment)}, not a power of two")
        start, end = -(-self._at // alignment) * alignment, 0
        entries = {}
        for name, (shape, kind, at) in sorted(declared.items(), key=lambda item: item[1][2]):
            if at % alignment:
                raise self._unsound(f"tensor {shown(name)} begins at byte {at}, which is not a multiple of {alignment}")
            if at < end:
                raise self._unsound(f"tensor {shown(name)} begins inside another tensor")
            entries[name] = self._tensor(name, shape, kind, start + at)
            end = at + entries[name].data.nbytes
        return entries

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, begin: int) -> GgufTensor:
        if kind not in GGML_QUANT_SIZES:
            raise unreadable(self._path, name, f"type {kind}")
        kind = GGMLQuantizationType(kind)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            raise self._unsound(
                f"tensor {shown(name)} has shape {list(shape)}, whose rows are not whole {kind.name} blocks"
            )
        stored = *shape[:-1], shape[-1] // block * block_bytes
        end = begin + prod(stored)
        self._check_end(end)
        return GgufTensor(name, shape, kind, self._bytes[begin:end].reshape(stored))

    def _number(self, code: str) -> Any:
        format = f"<{code}"
        return struct.unpack(format, self._take(struct.calcsize(format)))[0]

    def _take(self, size: int) -> memoryview:
        begin, self._at = self._at, self._at + size
        self._check_end(self._at)
        return self._view[begin : self._at]

    def _check_end(self, end: int) -> None:
        if end > len(self._view):
            raise self._unsound(f"it ends too early, at byte {len(self._view)}")

    def _unsound(self, what: str) -> UserError:
        return invalid_checkpoint(f"{self._path} is not a valid GGUF file ({what}): download it again.")


def unreadable(path: Path, name: str, kind: str) -> UserError:
    """Return the error for a tensor of a type that cannot be decoded."""
    return invalid_checkpoint(
        f"{path} stores {shown(name)} as {kind}, which cannot be read: give a file with another quantisation, such as "
        "Q8_0."
    )


def _check_parts(paths: list[Path], files: list[GgufFile]) -> None:
    """Check that files are all parts of one model. Raises UserError."""
    first = files[0].metadata
    for number, (path, file) in enumerate(zip(paths, files, strict=True)):
        count = file.metadata.get("split.count")
        if len(files) == 1 and count in (None, 0, 1):  # 0: what has been merged
            continue
        if len(files) == 1:
            raise invalid_checkpoint(
                f"{path} is one part of a split model, but its name does not say which: give all parts the names "
                "MODEL-00001-of-00003.gguf and so on, or merge them with `llama-gguf-split --merge`."
            )
        if count != len(files):
            raise _mixed(path, f"its split.count is {shown(count)}, but its name is that of one of {len(files)} parts")
        if file.metadata.get("split.no") != number:
            raise _mixed(path, f"its split.no is {shown(file.metadata.get('split.no'))}, not {number}")
        for key in ("general.architecture", "split.tensors.count"):
            if key in file.metadata and file.metadata[key] != first.get(key):
                raise _mixed(path, f"its {key} is {shown(file.metadata[key])}, not {shown(first.get(key))}")


def _mixed(path: Path, what: str) -> UserError:
    return invalid_checkpoint(
        f"{path} does not belong to a split model with the other files ({what}): download all parts again, and keep "
        "their names."
    )
