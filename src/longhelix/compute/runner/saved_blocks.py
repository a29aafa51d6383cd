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
    """saves: whether this rank is the one that saves its heads."""

    snapshot: Snapshot
    kvp_rank: int
    file: str
    saves: bool

    @classmethod
    def of(cls, config: EngineConfig, rank: int, pool: KVPool) -> Self:
        layout = config.layout
        layers = layout.layers(config.spec.num_layers, rank)
        snapshot = Snapshot(pool, layout.kv_heads(config.heads, rank), layers)
        return cls(snapshot, layout.kvp_rank(rank), file_name(rank), layout.keeps_kv_first(config.heads, rank))

    def save(
        self, folder: Path, first: int, blocks: Sequence[Block], before: Sequence[int], totals: Sequence[int]
    ) -> None:
        """Write this rank's KV blocks of a context, as `SaveBlocks` has them. Raises OSError."""
        own = {index: block.id for index, block in enumerate(blocks, first) if block.owner == self.kvp_rank}
        if own and self.saves:
            rank = self.kvp_rank
            self.snapshot.save(folder / self.file, totals[rank], before[rank], list(own), list(own.values()))

    def load(self, folder: Path, files: Sequence[SavedFile], first: int, blocks: Sequence[Block]) -> None:
        """Fill this rank's KV blocks of a context, as `LoadBlocks` has them. Raises UserError."""
        own = {index: block.id for index, block in enumerate(blocks, first) if block.owner == self.kvp_rank}
        if own and self.snapshot.heads:
            self.snapshot.load(folder, files, own)
