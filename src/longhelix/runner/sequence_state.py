"""A running sequence, as a rank follows it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from longhelix.cache.block_arena import BlockArena, Extent
from longhelix.kv.blocks import Block
from longhelix.parallel.pipeline import Travelling
from longhelix.request import NewSequence, Widened
from longhelix.runner.seen_tokens import SeenTokens


@dataclass(frozen=True, eq=False)
class AwaitedTokens:
    """The tokens of a step, on their way from the last pipeline stage, and whose they are."""

    sequences: "Sequence[SequenceState]"
    travelling: Travelling


@dataclass
class SequenceState:
    """This rank's copy of a sequence; steps bring its changes.

    length: tokens that have KV. local_length: those of them that have it on this rank. seen: which tokens the sequence
    has, in this rank's part of the vocabulary, where a repetition penalty needs them.
    """

    new: NewSequence
    frequencies_R: Tensor
    extent: Extent
    seen: SeenTokens | None = None
    last_token: int = 0  # that was sampled, on every rank of the last stage and of the first one
    awaited: "AwaitedTokens | None" = None  # with which it comes, while it is on its way to the first stage
    microbatch: int = 0
    length: int = 0
    local_length: int = 0
    last_owner: int = -1  # of the last KV block
    holders: set[int] = field(default_factory=set)  # the KVP ranks that take part: all, or the owners so far
    instances: tuple[int, ...] = ()  # see `NewSequence`

    def begin(self, kvp_rank: int, block_tokens: int, arena: BlockArena) -> None:
        """Take over the cached tokens. Their blocks are full, except perhaps the last one."""
        blocks = self.new.cached_blocks
        self.add_blocks(blocks, kvp_rank, arena)
        self.length = self.new.cached_tokens
        missing = len(blocks) * block_tokens - self.length if self.last_owner == kvp_rank else 0
        self.local_length = len(arena.ids(self.extent)) * block_tokens - missing

    def widen(self, widened: Widened, kvp_rank: int, block_tokens: int, arena: BlockArena) -> None:
        """Blocks that move leave this rank or come to it. They are full, and local order follows position as before."""
        left = [move.source.id for move in widened.moves if move.source.owner == kvp_rank]
        come = [move for move in widened.moves if move.target.owner == kvp_rank]
        ids = arena.ids(self.extent)
        ids = ids[~np.isin(ids, left)]
        # Each goes before what will lie behind it, counted without those that have come.
        before = [move.place - earlier for earlier, move in enumerate(come)]
        ids = np.insert(ids, before, [move.target.id for move in come])
        arena.close(self.extent)
        self.extent = arena.open(widened.blocks_per_rank[kvp_rank])
        arena.append(self.extent, ids)
        self.holders.update(move.target.owner for move in widened.moves)
        self.local_length += (len(come) - len(left)) * block_tokens

    def add_blocks(self, blocks: tuple[Block, ...], kvp_rank: int, arena: BlockArena) -> None:
        if blocks:
            self.last_owner = blocks[-1].owner
        self.holders.update(block.owner for block in blocks)
        arena.append(self.extent, [block.id for block in blocks if block.owner == kvp_rank])
