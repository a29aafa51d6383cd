"""Saves KV blocks of a rank's pool to its file, and loads the KV blocks that a rank needs from the files of all ranks.

Files do not depend on the arrangement of the pool, and saving rounds nothing.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.cache.rank_file import RankFile, StoredTensor, damaged, header_of, write_rows
from longhelix.compute.cache.saved_context import SavedFile
from longhelix.compute.kernels.stored import StoredPart, stored_parts
from longhelix.errors import UserError

_NUMBERS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "fp8": "F8_E4M3", "int8": "I8", "int4": "U8"}
_SCALES = {torch.uint8: "F8_E4M3", torch.int16: "BF16", torch.int32: "F32"}
# One thread verifies and copies this much at a time. Large, because each copy of a layer has a fixed cost.
_TURN_BYTES = 2**24


@dataclass(frozen=True)
class Snapshot:
    """A rank's pool with methods to save and load KV blocks.

    Attributes:
        heads: KV heads of the pool, for each of the model's layers.
        layers: Indices of the model's layers that have KV in the pool.
        groups: KV group of each of the model's layers.
    """

    pool: KVPool
    heads: Sequence[range]
    layers: range
    groups: Sequence[int]

    @cached_property
    def _parts(self) -> list[dict[str, StoredPart]]:
        """The stored parts of every layer of the pool, by name of the tensor in a file."""
        return [
            {f"{entry}.{name}": part for entry, cached in layer.items() for name, part in stored_parts(cached).items()}
            for layer in self.pool.layers
        ]

    def _layers_in(self, saved: SavedFile) -> list[int]:
        """Return the layers that a file has."""
        return [
            layer
            for layer in range(*saved.layers)
            if (saved.group is None or self.groups[layer] == saved.group)
            and (saved.only_layers is None or layer in saved.only_layers)
        ]

    def _stored_tensors(self, layer: int) -> dict[str, StoredTensor]:
        """Return dtype and shape of each tensor of one block and head in a layer, by name of the tensor in a file."""
        place, tensors = layer - self.layers.start, {}
        for name, part in self._parts[place].items():
            entry, vectors = name.split(".")
            format = self.pool.layers[place][entry].format
            number = _NUMBERS.get(format.dtype, "U8")  # several in a byte
            scale = "U8" if format.scales.vector_bits else _SCALES[part.view.dtype]  # of different kinds
            tensors[name] = StoredTensor(scale if vectors.endswith("_scales") else number, part.shape)
        return tensors

    def save(
        self,
        path: Path,
        num_blocks: int,
        first_row: int,
        indices: Sequence[int],
        ids: Sequence[int],
        layers: Sequence[int],
    ) -> None:
        """Write KV blocks of the pool to a file, for some layers. Raises OSError.

        Args:
            num_blocks: Number of blocks of the complete file.
            first_row: Number of blocks that were written before.
            indices: Indices of the blocks in the context.
            ids: Ids of the blocks in the pool.
            layers: Layers of the pool that keep KV of equal sizes, at least one.
        """
        ids_J = torch.tensor(ids, device=self.pool.device)
        parts = [self._parts[layer - self.layers.start] for layer in layers]
        of_layer = self._stored_tensors(layers[0])
        bits = {name: torch.stack([layer[name].read(ids_J) for layer in parts], 2).cpu().numpy() for name in of_layer}
        tensors = {name: StoredTensor(tensor.dtype, (len(parts), *tensor.shape)) for name, tensor in of_layer.items()}
        header = header_of(num_blocks, len(self.heads[layers[0]]), tensors)
        write_rows(path, header, num_blocks, first_row, np.array(indices, np.int64), bits)

    def load(self, folder: Path, files: Sequence[SavedFile], ids: Sequence[Mapping[int, int]]) -> None:
        """Fill KV blocks of the pool, for this rank's heads and layers.

        Raises UserError if a file has changed or something is missing. Some blocks may have been filled by then.

        Args:
            ids: Ids of the blocks in the pool by index in the context, for each KV group.
        """
        num_loaded = num_expected = 0
        for saved in files:
            layers = [layer for layer in self._layers_in(saved) if layer in self.layers]
            if layers and _overlap(self.heads[layers[0]], saved.heads):
                file = RankFile(folder / saved.name, saved.num_bytes, saved.checksum)
                self._check(file, saved, layers[0])
                for group, local_ids in enumerate(ids):
                    of_group = [layer for layer in layers if self.groups[layer] == group]
                    if local_ids and of_group:
                        num_loaded += self._load(file, saved, of_group, local_ids)
        for layer in self.layers:
            num_expected += len(ids[self.groups[layer]]) * len(self.heads[layer])
        if num_loaded != num_expected:
            raise UserError(
                f"context {folder.name!r} is damaged: its files do not contain each of its KV blocks exactly once; "
                "save it again",
                "invalid_context",
            )

    def _check(self, file: RankFile, saved: SavedFile, layer: int) -> None:
        """Raise UserError if the tensors of a file do not have the sizes and dtypes of this pool.

        Args:
            layer: A layer that is in the file and in the pool.
        """
        of_layer = self._stored_tensors(layer)
        sizes = len(file.blocks), saved.heads[1] - saved.heads[0], len(self._layers_in(saved))
        expected = {name: (*sizes, *tensor.shape) for name, tensor in of_layer.items()}
        if {name: array.shape for name, array in file.parts.items()} != expected:
            raise damaged(file.path, "the tensors do not have the sizes of this model's KV")
        for name, tensor in of_layer.items():
            dtypes = file.tensors[name].dtype, tensor.dtype
            if dtypes == ("F32", "BF16") and name.endswith("_scales"):
                raise UserError(
                    f"context {file.path.parent.name!r} was saved on GPUs with float32 scales, but CPU kernels need "
                    "bfloat16 scales: load it on GPUs, or save it again on this machine",
                    "context_mismatch",
                )
            if dtypes[0] != dtypes[1] and not (dtypes == ("BF16", "F32") and name.endswith("_scales")):
                raise damaged(file.path, f"{name} is {dtypes[0]} instead of {dtypes[1]}")

    def _load(self, file: RankFile, saved: SavedFile, layers: Sequence[int], ids: Mapping[int, int]) -> int:
        """Fill the blocks that a file has, in some of its layers, all of one KV group.

        Returns:
            The number of filled blocks, counted for each head and layer.
        """
        pool_heads = self.heads[layers[0]]
        heads = _overlap(pool_heads, saved.heads)
        in_file_of = self._layers_in(saved).index
        rows = [row for row, index in enumerate(file.blocks.tolist()) if index in ids]
        in_file = range(heads.start - saved.heads[0], heads.stop - saved.heads[0])
        in_pool = slice(heads.start - pool_heads.start, heads.stop - pool_heads.start)
        bits = {name: torch.from_numpy(array.view(f"i{array.itemsize}" if array.itemsize > 1 else "u1"))
                for name, array in file.parts.items()}  # fmt: skip
        most_rows = max(_TURN_BYTES // max(self.pool.block_bytes(), 1), 1)

        def turn(of_file: slice, of_pool: slice) -> None:
            file.verify(range(of_file.start, of_file.stop, of_file.step), in_file)
            for layer in layers:
                for name, part in self._parts[layer - self.layers.start].items():
                    stored = bits[name][of_file, in_file.start : in_file.stop, in_file_of(layer)]
                    part.write(of_pool, in_pool, _widened(stored, part.view.dtype))

        turns = list(even_turns(rows, [ids[int(file.blocks[row])] for row in rows], most_rows))
        with _single_threaded_pool() as threads:
            list(threads.map(turn, *zip(*turns, strict=True)))
        return len(rows) * len(heads) * len(layers)


def even_turns(rows: Sequence[int], ids: Sequence[int], most_rows: int) -> Iterator[tuple[slice, slice]]:
    """Split pairs of row and id into slices of at most `most_rows`, in which both ascend in even steps."""
    start = 0
    while start < len(rows):
        stop, steps = start + 1, (1, 1)
        if stop < len(rows) and ids[stop] > ids[start]:
            steps = rows[stop] - rows[start], ids[stop] - ids[start]
        while (
            stop < min(len(rows), start + most_rows)
            and (rows[stop] - rows[stop - 1], ids[stop] - ids[stop - 1]) == steps
        ):
            stop += 1
        yield slice(rows[start], rows[stop - 1] + 1, steps[0]), slice(ids[start], ids[stop - 1] + 1, steps[1])
        start = stop


@contextmanager
def _single_threaded_pool() -> Iterator[ThreadPoolExecutor]:
    """A pool with as many threads as torch has, while torch uses one thread in each of them.

    So checksums run in parallel too, and copies do not wait for each other.
    """
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count) as threads:
            yield threads
    finally:
        torch.set_num_threads(count)


def _widened(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert bits of bfloat16 scales to float32, which some pools have. The numbers are the same."""
    return bits.to(dtype) << 16 if (bits.dtype, dtype) == (torch.int16, torch.int32) else bits


def _overlap(items: range, bounds: tuple[int, int]) -> range:
    """Return the intersection of two ranges."""
    return range(max(items.start, bounds[0]), min(items.stop, bounds[1]))
