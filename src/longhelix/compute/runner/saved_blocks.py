"""Saves KV blocks of a rank's pool to its file, and loads KV blocks from the files of all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.cache.saved_context import SavedFile, file_name
from longhelix.compute.cache.snapshot import Snapshot
from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.saved_layers import SavedLayers, saved_groups, saved_layers
from longhelix.scheduler.kv.blocks import Block
from longhelix.spec.layout import Layout


@dataclass(frozen=True)
class SavedBlocks:
    """Saves and loads this rank's KV blocks of contexts."""

    snapshot: Snapshot
    rank: int
    layout: Layout
    files: tuple[SavedLayers, ...]  # of all ranks

    @classmethod
    def of(cls, config: EngineConfig, rank: int, pool: KVPool) -> Self:
        layout, spec = config.layout, config.spec
        attentions = (layer.attention for layer in spec.layers)
        heads = [range(0) if each is None else layout.kv_heads(each.heads, rank) for each in attentions]
        snapshot = Snapshot(pool, heads, layout.layers(spec.num_layers, rank), saved_groups(config))
        return cls(snapshot, rank, layout, saved_layers(config))

    def save(
        self,
        folder: Path,
        first: int,
        blocks: Sequence[Block],
        before: Sequence[Sequence[int]],
        totals: Sequence[Sequence[int]],
    ) -> None:
        """Write this rank's KV blocks of a context. Arguments are those of `SaveBlocks`. Raises OSError."""
        ids_of_groups = self._local_ids(first, blocks)
        for number, file in enumerate(self.files):
            layers = [layer for layer in file.layers if layer in self.snapshot.layers]
            ids = ids_of_groups[file.group]
            if ids and layers and self.layout.keeps_kv_first(file.heads, self.rank):
                counts = totals[file.group][self._kvp_rank], before[file.group][self._kvp_rank]
                path = folder / file_name(self.rank, number)
                self.snapshot.save(path, *counts, list(ids), list(ids.values()), layers)

    def load(self, folder: Path, files: Sequence[SavedFile], first: int, blocks: Sequence[Block]) -> None:
        """Fill this rank's KV blocks of a context. Arguments are those of `LoadBlocks`. Raises UserError."""
        ids = self._local_ids(first, blocks)
        if any(ids) and any(self.snapshot.heads):
            self.snapshot.load(folder, files, ids)

    @property
    def _kvp_rank(self) -> int:
        return self.layout.kvp_rank(self.rank)

    def _local_ids(self, first: int, blocks: Sequence[Block]) -> list[dict[int, int]]:
        """Return the ids of this rank's blocks by index, for each KV group."""
        groups = self.snapshot.pool.num_groups
        return [
            {
                index: block.id
                for index, block in enumerate(blocks[group::groups], first)
                if block.owner == self._kvp_rank and block.id >= 0
            }
            for group in range(groups)
        ]
