"""A prompt's full KV blocks, held by somebody who is no request: who fills them from elsewhere, or reads them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from longhelix.scheduler.block_pool import BlockPool
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.kv.placement import Continued, Placement
from longhelix.scheduler.kv.windows import HeldWindow, as_sent, passed


@dataclass(frozen=True)
class HeldPrefix:
    """The KV blocks of a prompt, held while a context is saved or loaded.

    The holder calls `release` at the end. Cached blocks then keep their content until other requests need the room.

    Attributes:
        blocks: in position order. The first `num_cached` of them have their KV.
        hashes: those of all blocks.
        windows: the blocks of each KV group with a limit.
    """

    blocks: tuple[Block, ...]
    num_cached: int
    hashes: tuple[bytes, ...]
    windows: tuple[HeldWindow, ...] = ()

    @property
    def is_cached(self) -> bool:
        """Whether all blocks have their KV."""
        return self.num_cached == len(self.blocks) and not any(window.new for window in self.windows)

    @property
    def sent(self) -> tuple[Block, ...]:
        """All blocks, as steps have them."""
        return as_sent(self.blocks, [passed(self.blocks, window.blocks) for window in self.windows])

    @property
    def missing(self) -> tuple[Block, ...]:
        """As `sent`, where blocks that have their KV count as passed."""
        new = passed(self.blocks, self.blocks[self.num_cached :])
        return as_sent(tuple(new), [passed(self.blocks, window.missing) for window in self.windows])

    @classmethod
    def take(cls, pool: BlockPool, hashes: Sequence[bytes], placement: Placement) -> Self | None:
        """Those that are cached, and new ones behind them, where `placement` has them. None if they are not free. Of
        groups with a limit, those that a request needs which goes on behind the prefix or at its last token."""
        cached = pool.cached(hashes)
        owners = tuple(block.owner for block in cached)
        continued = Continued(placement, owners) if owners else placement
        wanted = [continued.owner(index * placement.block_tokens) for index in range(len(cached), len(hashes))]
        counts, revived = Counter(wanted), pool.unheld(cached)
        if any(count > pool.allocators[rank].available for rank, count in (counts + revived).items()):
            return None
        windows = pool.hold_windows((*owners, *wanted), hashes)
        if windows is None:
            return None
        pool.share(cached)  # or a new block could be one of them
        # In the order of memory, where they are copied to in one go as far as they follow each other.
        taken = {rank: iter(sorted(pool.allocators[rank].take() for _ in range(counts[rank]))) for rank in counts}
        new = tuple(Block(owner, next(taken[owner])) for owner in wanted)
        pool.swaps.lose(new)
        return cls((*cached, *new), len(cached), tuple(hashes), windows)

    def publish(self, pool: BlockPool) -> None:
        """All blocks have their KV, or will have before the next step runs: let them be found."""
        first = self.num_cached
        pool.name(self.blocks[first:], self.hashes[first:], first * pool.block_tokens)
        for window, held in zip(pool.windows, self.windows, strict=True):
            window.publish(held, self.hashes)

    def release(self, pool: BlockPool) -> None:
        pool.unshare(self.blocks)
        for window, held in zip(pool.windows, self.windows, strict=True):
            window.unshare(held.blocks)
