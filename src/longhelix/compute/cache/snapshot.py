"""Saved contexts on one rank: KV blocks of the pool to the rank's file, and what a rank needs of all files to the pool.

What is saved says nothing of how the pool that it comes from is arranged, and nothing is rounded on the way.
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
# Checked and then copied by one thread: many, for each copy of a layer takes some time to begin.
_TURN_BYTES = 2**24


@dataclass(frozen=True)
class Snapshot:
    """A rank's pool, as saved contexts see it.

    Attributes:
        heads: which KV heads the pool has, by KV group. All layers of a group have the same.
        layers: which of the model's layers the pool has.
        groups: the KV group of each of the model's layers.
    """

    pool: KVPool
    heads: Sequence[range]
    layers: range
    groups: Sequence[int]

    @cached_property
    def _parts(self) -> list[dict[str, StoredPart]]:
        """What every layer stores, by the name of its tensor in a file."""
        return [
            {f"{entry}.{name}": part for entry, kept in layer.items() for name, part in stored_parts(kept).items()}
            for layer in self.pool.layers
        ]

    def has_layers(self, group: int) -> bool:
        """Whether any layer of the pool is in a KV group."""
        return bool(self._layers_of(group, self.layers))

    def _layers_of(self, group: int | None, layers: range) -> list[int]:
        """Those of the layers that are in a KV group. None: all."""
        return [layer for layer in layers if group is None or self.groups[layer] == group]

    def _kept(self, layer: int) -> dict[str, StoredTensor]:
        """What is kept of one block and head in a layer, by the name of its tensor in a file."""
        place, kept = layer - self.layers.start, {}
        for name, part in self._parts[place].items():
            entry, vectors = name.split(".")
            number = _NUMBERS.get(self.pool.layers[place][entry].format.dtype, "U8")  # several in a byte
            kept[name] = StoredTensor(_SCALES[part.view.dtype] if vectors.endswith("_scales") else number, part.shape)
        return kept

    def save(
        self, path: Path, num_blocks: int, first_row: int, indices: Sequence[int], ids: Sequence[int], group: int = 0
    ) -> None:
        """Write KV blocks of the pool to a file that will have `num_blocks` of them, of the layers of a KV group: those
        with `ids`, which are the context's blocks `indices`, after `first_row` others. Raises OSError."""
        ids_J, layers = torch.tensor(ids, device=self.pool.device), self._layers_of(group, self.layers)
        parts = [self._parts[layer - self.layers.start] for layer in layers]
        of_layer = self._kept(layers[0])
        bits = {name: torch.stack([layer[name].read(ids_J) for layer in parts], 2).cpu().numpy() for name in of_layer}
        kept = {name: StoredTensor(one.dtype, (len(parts), *one.shape)) for name, one in of_layer.items()}
        header = header_of(num_blocks, len(self.heads[group]), kept)
        write_rows(path, header, num_blocks, first_row, np.array(indices, np.int64), bits)

    def load(self, folder: Path, files: Sequence[SavedFile], ids: Sequence[Mapping[int, int]]) -> None:
        """Fill KV blocks of the pool, the context's blocks by KV group and index, for this rank's heads and layers.

        Raises UserError, perhaps after some were filled, if a file is not as it was saved, or something is missing.
        """
        found = wanted = 0
        for saved in files:
            layers = self._layers_of(saved.group, _both(self.layers, saved.layers))
            if layers and _both(self.heads[self.groups[layers[0]]], saved.heads):
                file = RankFile(folder / saved.name, saved.num_bytes, saved.checksum)
                self._check(file, saved, layers[0])
                for group, own in enumerate(ids):
                    of_group = [layer for layer in layers if self.groups[layer] == group]
                    if own and of_group:
                        found += self._load(file, saved, of_group, own)
        for group, own in enumerate(ids):
            wanted += len(own) * len(self.heads[group]) * len(self._layers_of(group, self.layers))
        if found != wanted:
            raise UserError(
                f"context {folder.name!r} is damaged: its files do not contain each of its KV blocks exactly once; "
                "save it again",
                "invalid_context",
            )

    def _check(self, file: RankFile, saved: SavedFile, layer: int) -> None:
        """Refuse a file whose tensors are not those of this pool, of as many heads and layers as it is said to have.

        layer: one of those that the file and the pool have.
        """
        of_layer = self._kept(layer)
        num_layers = len(self._layers_of(saved.group, range(*saved.layers)))
        sizes = len(file.blocks), saved.heads[1] - saved.heads[0], num_layers
        wanted = {name: (*sizes, *kept.shape) for name, kept in of_layer.items()}
        if {name: array.shape for name, array in file.parts.items()} != wanted:
            raise damaged(file.path, "the tensors do not have the sizes of this model's KV")
        for name, kept in of_layer.items():
            dtypes = file.tensors[name].dtype, kept.dtype
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

        Returns how many blocks, each head and layer counted.
        """
        own = self.heads[self.groups[layers[0]]]
        heads = _both(own, saved.heads)
        in_file_of = self._layers_of(saved.group, range(*saved.layers)).index
        rows = [row for row, index in enumerate(file.blocks.tolist()) if index in ids]
        in_file = range(heads.start - saved.heads[0], heads.stop - saved.heads[0])
        in_pool = slice(heads.start - own.start, heads.stop - own.start)
        bits = {name: torch.from_numpy(array.view(f"i{array.itemsize}" if array.itemsize > 1 else "u1"))
                for name, array in file.parts.items()}  # fmt: skip
        most = max(_TURN_BYTES // max(self.pool.block_bytes(), 1), 1)

        def turn(of_file: slice, of_pool: slice) -> None:
            file.verify(range(of_file.start, of_file.stop, of_file.step), in_file)
            for layer in layers:
                for name, part in self._parts[layer - self.layers.start].items():
                    given = bits[name][of_file, in_file.start : in_file.stop, in_file_of(layer)]
                    part.write(of_pool, in_pool, _widened(given, part.view.dtype))

        turns = list(even_turns(rows, [ids[int(file.blocks[row])] for row in rows], most))
        with _own_threads() as threads:
            list(threads.map(turn, *zip(*turns, strict=True)))
        return len(rows) * len(heads) * len(layers)


def even_turns(rows: Sequence[int], ids: Sequence[int], most: int) -> Iterator[tuple[slice, slice]]:
    """Rows and ids, side by side, as slices of at most `most` of each: as long as both go up in even steps."""
    start = 0
    while start < len(rows):
        stop, steps = start + 1, (1, 1)
        if stop < len(rows) and ids[stop] > ids[start]:
            steps = rows[stop] - rows[start], ids[stop] - ids[start]
        while stop < min(len(rows), start + most) and (rows[stop] - rows[stop - 1], ids[stop] - ids[stop - 1]) == steps:
            stop += 1
        yield slice(rows[start], rows[stop - 1] + 1, steps[0]), slice(ids[start], ids[stop - 1] + 1, steps[1])
        start = stop


@contextmanager
def _own_threads() -> Iterator[ThreadPoolExecutor]:
    """As many threads as torch has, which has one then in each: Python's own wait for nobody in the middle of a copy,
    and checksums are none of torch's."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count) as threads:
            yield threads
    finally:
        torch.set_num_threads(count)


def _widened(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """bfloat16 scales as the float32 ones that some pools have: the same numbers."""
    return bits.to(dtype) << 16 if (bits.dtype, dtype) == (torch.int16, torch.int32) else bits


def _both(own: range, bounds: tuple[int, int]) -> range:
    """What two ranges have in common."""
    return range(max(own.start, bounds[0]), min(own.stop, bounds[1]))
