"""The file that a rank writes for a saved context, in the safetensors format. Readers verify it before they use it.

The format: https://github.com/huggingface/safetensors#format. The index comes first: the header, the indices of the
file's KV blocks (`blocks`, int64), and a CRC-32 of each block and head (`checksums`, over its bytes in all tensors, in
their order). All other tensors are (J, k, L, ...), in the order of `compute/kernels/stored.py`. The bytes of one block
and head are contiguous in each tensor, and readers verify them separately.
"""

import hashlib
import json
import math
import mmap
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longhelix.errors import UserError

_NUMPY = {"F32": np.uint32, "BF16": np.uint16, "F16": np.uint16, "F8_E4M3": np.uint8, "I8": np.uint8, "U8": np.uint8,
          "U32": np.uint32, "I64": np.int64}  # fmt: skip
_ALIGNED_BYTES = 64
_LONGEST_HEADER = 2**20


class StoredTensor(NamedTuple):
    """The safetensors dtype and the shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(_NUMPY[self.dtype]).itemsize


def header_of(num_blocks: int, num_heads: int, parts: Mapping[str, StoredTensor]) -> bytes:
    """Return the bytes before the first tensor. parts: tensors of one block and head, (L, ...), by name."""
    tensors = {"blocks": StoredTensor("I64", (num_blocks,)), "checksums": StoredTensor("U32", (num_blocks, num_heads))}
    tensors |= {name: StoredTensor(part.dtype, (num_blocks, num_heads, *part.shape)) for name, part in parts.items()}
    entries, start = {}, 0
    for name, tensor in tensors.items():
        stop = start + tensor.num_bytes
        entries[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, stop)}
        start = stop
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNED_BYTES)
    return len(text).to_bytes(8, "little") + text


class RankFile:
    """A mapped file of a rank. Raises UserError if it is damaged, or not of the saved size and index."""

    def __init__(self, path: Path, num_bytes: int | None = None, checksum: str | None = None) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.num_bytes = os.fstat(file.fileno()).st_size
                # Copy-on-write, because torch requires writable memory. Nothing writes to it.
                self._mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if self.num_bytes else b""
        except FileNotFoundError:
            raise damaged(path, "it is missing") from None
        except OSError as error:
            raise damaged(path, f"it cannot be read ({error.strerror})") from error
        if num_bytes not in (None, self.num_bytes):
            raise damaged(path, f"it has {self.num_bytes} bytes, but {num_bytes} were saved")
        self._bytes = np.frombuffer(self._mapped, np.uint8)
        self.tensors, self._starts = self._read_header()
        self.checksum = hashlib.sha256(self._bytes[: self._index_bytes]).hexdigest()
        if checksum not in (None, self.checksum):
            raise damaged(path, "its index has changed since it was saved")
        self.blocks: NDArray[np.int64] = self._array("blocks")
        self._checksums: NDArray[np.uint32] = self._array("checksums")

    def _read_header(self) -> tuple[dict[str, StoredTensor], dict[str, int]]:
        first = 8 + int.from_bytes(self._bytes[:8].tobytes(), "little")
        try:
            if not 8 < first <= min(self.num_bytes, _LONGEST_HEADER):
                raise ValueError
            entries = json.loads(self._bytes[8:first].tobytes())
            tensors = {name: StoredTensor(entry["dtype"], tuple(entry["shape"])) for name, entry in entries.items()}
            starts = {name: first + entry["data_offsets"][0] for name, entry in entries.items()}
            begins = [starts[name] for name in tensors]
            ends = [starts[name] + tensor.num_bytes for name, tensor in tensors.items()]
            if list(tensors)[:2] != ["blocks", "checksums"] or [first, *ends] != [*begins, self.num_bytes]:
                raise ValueError
            self._index_bytes = ends[1]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise damaged(self.path, "its header is not valid for a saved context") from error
        return tensors, starts

    def _array(self, name: str) -> NDArray:
        tensor, start = self.tensors[name], self._starts[name]
        return self._bytes[start : start + tensor.num_bytes].view(_NUMPY[tensor.dtype]).reshape(tensor.shape)

    @property
    def parts(self) -> dict[str, NDArray]:
        """The KV tensors by name, (J, k, L, ...): bits in views of the file."""
        return {name: self._array(name) for name in list(self.tensors)[2:]}

    def verify(self, rows: Iterable[int], heads: range) -> None:
        """Raise UserError if the bytes of some blocks and heads have changed. rows: rows of the blocks in the file."""
        parts = list(self.parts.values())
        for row in rows:
            for head in heads:
                if checksum_of(parts, row, head) != self._checksums[row, head]:
                    raise damaged(self.path, f"KV block {self.blocks[row]} has changed since it was saved")


def checksum_of(parts: Iterable[NDArray], row: int, head: int) -> int:
    """Return the CRC-32 of one block and head."""
    checksum = 0
    for array in parts:
        checksum = zlib.crc32(array[row, head], checksum)
    return checksum


def write_rows(
    path: Path, header: bytes, num_blocks: int, first_row: int, blocks: NDArray, parts: Mapping[str, NDArray]
) -> None:
    """Write some rows of a file's tensors from `first_row` on, and sync them to disk. Raises OSError.

    The first call creates the file with its complete size. Rows are in position order.
    """
    arrays = list(parts.values())
    checksums = [[checksum_of(arrays, row, head) for head in range(arrays[0].shape[1])] for row in range(len(blocks))]
    rows = {"blocks": blocks, "checksums": np.array(checksums, np.uint32), **parts}
    with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
        start = len(header)
        if not first_row:
            total = start + sum(array[0].nbytes for array in rows.values()) * num_blocks
            os.posix_fallocate(file.fileno(), 0, total)  # fails early if the disk is full
            _write(file.fileno(), header, 0)
        for array in rows.values():
            row_bytes = array[0].nbytes
            _write(file.fileno(), np.ascontiguousarray(array).view(np.uint8).data, start + first_row * row_bytes)
            start += num_blocks * row_bytes
        os.fdatasync(file.fileno())


def _write(descriptor: int, data: bytes | memoryview, at: int) -> None:
    remaining = memoryview(data).cast("B")
    while len(remaining):
        written = os.pwrite(descriptor, remaining, at)
        remaining, at = remaining[written:], at + written


def damaged(path: Path, how: str) -> UserError:
    """Return the error for a file of a context that cannot be used. Its folder has the context's name."""
    name = path.parent.name
    return UserError(
        f"context {name!r} is damaged (file {path.name}: {how}): remove it with longhelix context rm, and save it "
        "again",
        "invalid_context",
    )
