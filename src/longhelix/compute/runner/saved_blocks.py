"""What a rank does for saved contexts: KV blocks of its pool to its file, and from the files of all ranks."""

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
    """files: by KV group. saves: whether this rank is the one that saves its heads, by KV group."""

    snapshot: Snapshot
    kvp_rank: int
    files: tuple[str, ...]
    saves: tuple[bool, ...]

    @classmethod
    def of(cls, config: EngineConfig, rank: int, pool: KVPool) -> Self:
        layout = config.layout
        layers = layout.layers(config.spec.num_layers, rank)
        groups = config.spec.groups if config.scheduler.windows else (0,) * config.spec.num_layers
        heads = [config.spec.heads_of(group) or config.heads for group in range(pool.num_groups)]
        snapshot = Snapshot(pool, [layout.kv_heads(each, rank) for each in heads], layers, groups)
        files = tuple(file_name(rank, group) for group in range(pool.num_groups))
        saves = tuple(layout.keeps_kv_first(each, rank) for each in heads)
        return cls(snapshot, layout.kvp_rank(rank), files, saves)

    def save(
        self,
        folder: Path,
        first: int,
        blocks: Sequence[Block],
        before: Sequence[Sequence[int]],
        totals: Sequence[Sequence[int]],
    ) -> None:
        """Write this rank's KV blocks of a context, as `SaveBlocks` has them. Raises OSError."""
        for group, own in enumerate(self._own(first, blocks)):
            if own and self.saves[group] and self.snapshot.has_layers(group):
                counts = totals[group][self.kvp_rank], before[group][self.kvp_rank]
                self.snapshot.save(folder / self.files[group], *counts, list(own), list(own.values()), group)

    def load(self, folder: Path, files: Sequence[SavedFile], first: int, blocks: Sequence[Block]) -> None:
        """Fill this rank's KV blocks of a context, as `LoadBlocks` has them. Raises UserError."""
        own = self._own(first, blocks)
        if any(own) and any(self.snapshot.heads):
            self.snapshot.load(folder, files, own)

    def _own(self, first: int, blocks: Sequence[Block]) -> list[dict[int, int]]:
        """This rank's blocks by KV group: their ids by index."""
        groups = len(self.files)
        return [
            {
                index: block.id
                for index, block in enumerate(blocks[group::groups], first)
                if block.owner == self.kvp_rank and block.id >= 0
            }
            for group in range(groups)
        ]
