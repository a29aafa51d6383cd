"""Prefix blocks that a saved context pins while it is read or written, rather than a running request."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from longhelix.scheduler.block_pool import BlockPool
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.kv.placement import Continued, Placement
from longhelix.scheduler.kv.windows import PinnedWindow, as_sent, with_expired


@dataclass(frozen=True)
class PinnedPrefix:
    """The KV blocks of a prompt, pinned while a context is saved or loaded.

    The caller must call `release` at the end. Cached blocks then keep their content until they are evicted.

    Attributes:
        blocks: The blocks, in position order.
        num_cached: Number of blocks at the start that already have their KV.
        hashes: Content hashes of all blocks.
        windows: The blocks of each KV group with a limit.
    """

    blocks: tuple[Block, ...]
    num_cached: int
    hashes: tuple[bytes, ...]
    windows: tuple[PinnedWindow, ...] = ()

    @property
    def is_cached(self) -> bool:
        """Whether all blocks have their KV."""
        return self.num_cached == len(self.blocks) and not any(window.new for window in self.windows)

    @property
    def sent(self) -> tuple[Block, ...]:
        """All blocks, as steps have them."""
        return as_sent(self.blocks, [with_expired(self.blocks, window.blocks) for window in self.windows])

    @property
    def missing(self) -> tuple[Block, ...]:
        """As `sent`, but blocks that already have their KV have the id of expired ones."""
        new = with_expired(self.blocks, self.blocks[self.num_cached :])
        return as_sent(tuple(new), [with_expired(self.blocks, window.missing) for window in self.windows])

    @classmethod
    def take(cls, pool: BlockPool, hashes: Sequence[bytes], placement: Placement) -> Self | None:
        """Pin the cached blocks of a prompt, and new ones behind them.

        In groups with a limit, these are the blocks that a request needs to continue behind the prefix, or at its last
        token.

        Args:
            hashes: Content hashes of the prompt's full blocks.
            placement: Where new blocks go.

        Returns:
            The pinned prefix. None if too few blocks are free.
        """
        cached = pool.cached(hashes)
        owners = tuple(block.owner for block in cached)
        continued = Continued(placement, owners) if owners else placement
        new_owners = [continued.owner(index * placement.block_tokens) for index in range(len(cached), len(hashes))]
        counts, revived = Counter(new_owners), pool.unheld(cached)
        if any(count > pool.allocators[rank].available for rank, count in (counts + revived).items()):
            return None
        windows = pool.pin_windows((*owners, *new_owners), hashes)
        if windows is None:
            return None
        pool.share(cached)  # or a new block could be one of them
        # Ids in ascending order: blocks that are consecutive in memory are copied at once.
        ids = {rank: iter(sorted(pool.allocators[rank].take() for _ in range(counts[rank]))) for rank in counts}
        new = tuple(Block(owner, next(ids[owner])) for owner in new_owners)
        pool.swaps.cancel_for(new)
        return cls((*cached, *new), len(cached), tuple(hashes), windows)

    def publish(self, pool: BlockPool) -> None:
        """Make the blocks findable. All of them must have their KV before the next step runs."""
        first = self.num_cached
        pool.name(self.blocks[first:], self.hashes[first:], first * pool.block_tokens)
        for group, window in zip(pool.windows, self.windows, strict=True):
            group.publish(window, self.hashes)

    def release(self, pool: BlockPool) -> None:
        pool.unshare(self.blocks)
        for group, window in zip(pool.windows, self.windows, strict=True):
            group.unshare(window.blocks)
