"""Saves KV blocks of a rank's pool to its file, and loads KV blocks from the files of all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.cache.saved_context import SavedFile, file_name
from longhelix.compute.cache.snapshot import Snapshot
from longhelix.compute.runner.config import EngineConfig
from longhelix.scheduler.kv.blocks import Block


@dataclass(frozen=True)
class SavedBlocks:
    """Saves and loads this rank's KV blocks of contexts."""

    snapshot: Snapshot
    kvp_rank: int
    files: tuple[str, ...]  # name for each KV group
    saves: tuple[bool, ...]  # for each KV group, whether this rank saves its heads, and not another rank

    @classmethod
    def of(cls, config: EngineConfig, rank: int, pool: KVPool) -> Self:
        layout = config.layout
        layers = layout.layers(config.spec.num_layers, rank)
        groups = config.spec.groups if config.scheduler.cache.windows else (0,) * config.spec.num_layers
        heads = [config.spec.heads_of(group) or config.heads for group in range(pool.num_groups)]
        snapshot = Snapshot(pool, [layout.kv_heads(heads_of_group, rank) for heads_of_group in heads], layers, groups)
        files = tuple(file_name(rank, group) for group in range(pool.num_groups))
        saves = tuple(layout.keeps_kv_first(heads_of_group, rank) for heads_of_group in heads)
        return cls(snapshot, layout.kvp_rank(rank), files, saves)

    def save(
        self,
        folder: Path,
        first: int,
        blocks: Sequence[Block],
        before: Sequence[Sequence[int]],
        totals: Sequence[Sequence[int]],
    ) -> None:
        """Write this rank's KV blocks of a context. Arguments are those of `SaveBlocks`. Raises OSError."""
        for group, ids in enumerate(self._local_ids(first, blocks)):
            if ids and self.saves[group] and self.snapshot.has_layers(group):
                counts = totals[group][self.kvp_rank], before[group][self.kvp_rank]
                self.snapshot.save(folder / self.files[group], *counts, list(ids), list(ids.values()), group)

    def load(self, folder: Path, files: Sequence[SavedFile], first: int, blocks: Sequence[Block]) -> None:
        """Fill this rank's KV blocks of a context. Arguments are those of `LoadBlocks`. Raises UserError."""
        ids = self._local_ids(first, blocks)
        if any(ids) and any(self.snapshot.heads):
            self.snapshot.load(folder, files, ids)

    def _local_ids(self, first: int, blocks: Sequence[Block]) -> list[dict[int, int]]:
        """Return the ids of this rank's blocks by index, for each KV group."""
        groups = len(self.files)
        return [
            {
                index: block.id
                for index, block in enumerate(blocks[group::groups], first)
                if block.owner == self.kvp_rank and block.id >= 0
            }
            for group in range(groups)
        ]
