"""KV groups with a limit: layers whose rows see only a window of the tokens, or only their chunk.

In such a group, a request keeps the blocks that its next rows see and frees the blocks behind them, which have expired.
All groups of a request have the same owners: the block at a place of its tokens is on the same KVP rank in each group.
"""

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from longhelix.scheduler.cache_record import Tier
from longhelix.scheduler.kv.blocks import Block, BlockAllocator, Slot, by_rank, kept
from longhelix.scheduler.kv.placement import Placement
from longhelix.scheduler.swaps import Swaps
from longhelix.spec.attention import Visibility

EXPIRED_ID = -1  # id of a block that has expired, or that the request never had


class KVWindow(NamedTuple):
    """What rows of a group see, and the sizes of its pools.

    Attributes:
        visibility: Which tokens a row sees.
        num_blocks: KV blocks of each KVP rank.
        num_slots: Slots of each KVP rank for the content of evicted blocks.
    """

    visibility: Visibility
    num_blocks: int
    num_slots: int = 0


def span_blocks(visibility: Visibility, block_tokens: int) -> int:
    """Return the most consecutive blocks that a request has in a group while it grows by a block.

    These are the blocks whose tokens its next row sees, the next block, and one block behind them, so that another
    request can begin one block before the end of this one.
    """
    assert visibility.limit_tokens is not None
    return -(-visibility.limit_tokens // block_tokens) + 3


@dataclass(eq=False, slots=True)
class WindowBlocks:
    """The KV blocks of a request in a group.

    Attributes:
        most_at_once: The most blocks that it needs on a KVP rank at once, without chunks.
        reserved: Blocks of each KVP rank that are reserved for it and that it does not have yet.
        blocks: The blocks that it still has, in position order.
        first: Number of the request's blocks before these.
        num_apart: Number of its first blocks, including the `first` ones, that do not count towards `most_at_once`,
            because other requests have placed them differently.
    """

    most_at_once: int
    reserved: list[int]
    blocks: deque[Block] = field(default_factory=deque)
    first: int = 0
    num_apart: int = 0


class WindowPrefix(NamedTuple):
    """The cached blocks of a group that a request begins with: the ones that its next row sees.

    Attributes:
        first: The place in the prompt of the first block.
        blocks: The blocks, or the slots of swapped blocks.
    """

    first: int = 0
    blocks: tuple[Block | Slot, ...] = ()

    def full_blocks(self, full: int) -> tuple[Block | Slot, ...]:
        """Return the blocks before the place `full`."""
        return self.blocks[: max(full - self.first, 0)]


class PinnedWindow(NamedTuple):
    """Blocks of a group that a saved context pins while it is written or loaded.

    Attributes:
        first: The place in the prompt of the first block.
        blocks: The blocks, in position order.
        new: The places of the blocks that do not have their KV yet.
    """

    first: int
    blocks: tuple[Block, ...]
    new: frozenset[int]

    @property
    def missing(self) -> list[Block]:
        """The blocks. Those that already have their KV have the id of expired ones."""
        return [
            block if place in self.new else Block(block.owner, EXPIRED_ID)
            for place, block in enumerate(self.blocks, self.first)
        ]


class WindowGroup:
    """The KV blocks of one group on all KVP ranks.

    Each rank has its own index of blocks and of slots, because a request that begins with cached blocks needs them on
    the ranks of its other blocks.

    Admission reserves all blocks that a request needs at the same time, so requests are rarely preempted because of
    windows. Chunks also use free blocks, and the scheduler shortens a chunk if too few are free. A block that several
    requests share counts once for each of them. So the allocator can always reserve a block for a request that frees
    one.

    Args:
        spare: Number of blocks on each rank that admission keeps free for the chunks of a step.
        group: Number of the group.
        is_reachable: Returns whether the layers without a limit still have a block with this hash.
        touch: Called with the hash of each block that becomes findable, or is findable no longer.
    """

    def __init__(
        self,
        window: KVWindow,
        kvp: int,
        block_tokens: int,
        spare: int,
        group: int,
        is_reachable: Callable[[bytes], bool] = lambda content_hash: True,
        touch: Callable[[bytes], None] | None = None,
    ) -> None:
        self.visibility = window.visibility
        self._touch = touch
        record = None if touch is None else _Touched(touch)
        indices = [dict[bytes, Block]() for _ in range(kvp)]
        self.swaps = [
            Swaps(kvp, window.num_slots, index, is_reachable=is_reachable, record=record, group=group)
            for index in indices
        ]
        self.allocators = [
            BlockAllocator(
                window.num_blocks,
                rank,
                index,
                evicted=self.swaps[rank].evicted if window.num_slots else None,
                record=record,
            )
            for rank, index in enumerate(indices)
        ]
        self.num_blocks = window.num_blocks
        self._kvp, self._block_tokens = kvp, block_tokens
        self._span = span_blocks(window.visibility, block_tokens)
        self._spare = min(spare, window.num_blocks // 4)

    def first_place(self, position: int) -> int:
        """The place of the first block that a row at `position` sees."""
        return self.visibility.first_seen(position) // self._block_tokens

    def most_at_once(self, placement: Placement) -> int:
        """The most blocks of a rank that a request needs at once."""
        return -(-self._span // self._kvp) if placement.spread else self._span

    def blocks_to_reserve(self, new: Items[int], prefix: WindowPrefix, full: int, placement: Placement) -> list[int]:
        """Return how many blocks of each rank admission reserves for a request.

        Args:
            new: Number of new blocks that the request's prompt needs on each rank.
            prefix: The cached blocks that the request begins with.
            full: Number of full blocks in the whole prefix.
        """
        most, blocks = self.most_at_once(placement), prefix.full_blocks(full)
        swapped = Counter(block.owner for block in blocks if isinstance(block, Slot))
        if not placement.even:  # blocks that others have placed come on top of those that it needs at once
            return [min(count, most) + swapped[rank] for rank, count in enumerate(new)]
        shared = Counter(block.owner for block in kept(blocks))
        return [min(count + swapped[rank], max(most - shared[rank], 0)) for rank, count in enumerate(new)]

    def fits(self, reservations: Items[int], prefix: WindowPrefix, *, alone: bool) -> bool:
        """Return whether a request can begin now.

        Args:
            reservations: Blocks to reserve for it on each rank.
            prefix: The cached blocks that it begins with.
            alone: Whether no other request runs.
        """
        ids, spare = by_rank(kept(prefix.blocks), self._kvp), 0 if alone else self._spare
        return all(
            reservations[rank] + len(ids[rank]) + spare <= allocator.available
            for rank, allocator in enumerate(self.allocators)
        )

    def may_fit(self, needed: Items[int], placement: Placement) -> bool:
        """Return False only if there is certainly no room for a request.

        Args:
            needed: Number of blocks that the whole prompt needs on each rank, including cached ones.
        """
        # The blocks that the next row sees, whether they are cached or not. A chunk may begin with it.
        seen = 1 if self.visibility.window_tokens is None else max(self._span - 4, 1)
        if not placement.spread:
            return min(seen, sum(needed)) <= sum(allocator.available for allocator in self.allocators)
        return all(
            min(seen // self._kvp, count - 1) <= allocator.available
            for count, allocator in zip(needed, self.allocators, strict=True)
        )

    def last_missing(
        self,
        first: int,
        stop: int,
        prompt_blocks: Items[Block | Slot],
        hash_at: Callable[[int], bytes],
        *,
        in_pool: bool = False,
    ) -> int | None:
        """Return the last place from `first` to `stop` whose block is not cached. None if all blocks are cached.

        Args:
            prompt_blocks: The prompt's blocks of the layers without a limit.
            hash_at: Returns the content hash of the block at a place.
            in_pool: Whether swapped blocks count as not cached.
        """
        for place in range(stop - 1, first - 1, -1):
            rank, content_hash = prompt_blocks[place].owner, hash_at(place)
            if content_hash not in self.allocators[rank].index and (
                in_pool or content_hash not in self.swaps[rank].index
            ):
                return place
        return None

    def is_found(self, rank: int, content_hash: bytes) -> bool:
        """Return whether a block or a slot of a rank has this content."""
        return content_hash in self.allocators[rank].index or content_hash in self.swaps[rank].index

    def cached(self, first: int, prompt_blocks: Items[Block | Slot], hash_at: Callable[[int], bytes]) -> WindowPrefix:
        """Return the blocks of a prompt from the place `first` on. All of them must be cached.

        Args:
            prompt_blocks: See `last_missing`.
        """
        blocks = list[Block | Slot]()
        for place in range(first, len(prompt_blocks)):
            rank, content_hash = prompt_blocks[place].owner, hash_at(place)
            block = self.allocators[rank].index.get(content_hash)
            blocks.append(self.swaps[rank].index[content_hash] if block is None else block)
        return WindowPrefix(first, tuple(blocks))

    def pin(self, owners: Items[int], hashes: Items[bytes]) -> PinnedWindow | None:
        """Pin the blocks that a request needs to continue behind a prompt's full blocks, or at their last token.

        Args:
            owners: The KVP rank of each of the prompt's full blocks.
            hashes: Their content hashes.

        Returns:
            The cached blocks and new ones. None if too few blocks are free.
        """
        first = self.first_place(max((len(hashes) - 1) * self._block_tokens, 0))
        hits = [self._in_pool(owners[place], hashes[place]) for place in range(first, len(hashes))]
        new = [place for place, block in enumerate(hits, first) if block is None]
        cached = [block for block in hits if block is not None]
        ids, counts = by_rank(cached, self._kvp), Counter(owners[place] for place in new)
        if any(counts[rank] + len(ids[rank]) > allocator.available for rank, allocator in enumerate(self.allocators)):
            return None
        self.share(cached)
        blocks = tuple(
            Block(owners[place], self.allocators[owners[place]].take()) if block is None else block
            for place, block in enumerate(hits, first)
        )
        written = {blocks[place - first] for place in new}
        for swaps in self.swaps:
            swaps.cancel_for(written)
        return PinnedWindow(first, blocks, frozenset(new))

    def _in_pool(self, rank: int, content_hash: bytes) -> Block | None:
        """Return the block of a rank that has this content now. None if there is none, or if it is still swapped in."""
        block = self.allocators[rank].index.get(content_hash)
        return None if block in self.swaps[rank].awaited else block

    def publish(self, pinned: PinnedWindow, hashes: Items[bytes]) -> None:
        """Make pinned blocks findable. All of them must have their KV."""
        for place in pinned.new:
            self._name(pinned.blocks[place - pinned.first], hashes[place])

    def has(self, blocks: Items[Block | Slot], hashes: Items[bytes]) -> bool:
        """Return whether all blocks that `pin` would pin are cached. If so, they become the last ones to be evicted.

        Args:
            blocks: The prompt's blocks of the layers without a limit.
            hashes: Their content hashes.
        """
        first = self.first_place(max((len(hashes) - 1) * self._block_tokens, 0))
        if self.last_missing(first, len(hashes), blocks, hashes.__getitem__, in_pool=True) is not None:
            return False
        prefix = self.cached(first, blocks, hashes.__getitem__)
        for allocator, ids in zip(self.allocators, by_rank(kept(prefix.blocks), self._kvp), strict=True):
            allocator.refresh(ids)
        return True

    def begin(self, reservations: list[int], prefix: WindowPrefix, full: int, placement: Placement) -> WindowBlocks:
        """Give a request the full blocks of its prefix, and reserve others for it.

        Swapped blocks are swapped in to reserved ones.

        Args:
            reservations: Blocks to reserve on each rank.
            prefix: The cached blocks that the request begins with.
            full: Number of full blocks in the whole prefix.
        """
        blocks = prefix.full_blocks(full)
        self.share(kept(blocks))
        for allocator, count in zip(self.allocators, reservations, strict=True):
            allocator.reserve(count)
        num_apart = 0 if placement.even else full
        window = WindowBlocks(
            most_at_once=self.most_at_once(placement),
            reserved=reservations,
            first=min(prefix.first, full),
            num_apart=num_apart,
        )
        swapped_in: list[tuple[Slot, Block]] = []
        for block in blocks:
            if isinstance(block, Block):
                window.blocks.append(block)
            else:
                swapped_in.append((block, self.take(window, block.owner)))
        self._swap_in(swapped_in)
        return window

    def _swap_in(self, swapped_in: Items[tuple[Slot, Block]]) -> None:
        """Fill blocks with the content of slots in the next step. They are findable at once."""
        for rank, swaps in enumerate(self.swaps):
            pairs = [(slot, target) for slot, target in swapped_in if slot.owner == rank]
            for slot, target in pairs:
                self._name(target, swaps.hash_of(slot))
            swaps.swap_in([slot for slot, _ in pairs], [target for _, target in pairs])

    def has_room(self, window: WindowBlocks, rank: int) -> bool:
        """Whether a request can have one more block of a rank."""
        return bool(window.reserved[rank]) or self.allocators[rank].available > 0

    def room(self, window: WindowBlocks) -> list[int]:
        """Return how many more blocks of each rank a request can have now."""
        return [count + allocator.available for count, allocator in zip(window.reserved, self.allocators, strict=True)]

    def take(self, window: WindowBlocks, rank: int) -> Block:
        """Give a request its next block, on a rank that has room."""
        allocator = self.allocators[rank]
        if window.reserved[rank]:
            window.reserved[rank] -= 1
            block = Block(rank, allocator.take_reserved())
        else:
            block = Block(rank, allocator.take())
        window.blocks.append(block)
        return block

    def cut(self, window: WindowBlocks) -> None:
        """Take back the last block of a request, and reserve it again if the request may need it."""
        block = window.blocks.pop()
        allocator = self.allocators[block.owner]
        allocator.release(array("q", [block.id]), 0)
        counted = islice(window.blocks, max(window.num_apart - window.first, 0), None)
        if window.reserved[block.owner] + sum(other.owner == block.owner for other in counted) < window.most_at_once:
            allocator.reserve(1)
            window.reserved[block.owner] += 1

    def can_swap(self, window: WindowBlocks, first: int, second: int) -> bool:
        """Return whether `swap` has enough free blocks for a request."""
        room = self.room(window)
        return window.reserved[first] <= room[second] and window.reserved[second] <= room[first]

    def swap(self, window: WindowBlocks, first: int, second: int) -> None:
        """Exchange the numbers of blocks that are reserved for a request on two ranks."""
        reserved = window.reserved
        for rank, change in ((first, reserved[second] - reserved[first]), (second, reserved[first] - reserved[second])):
            if change < 0:
                self.allocators[rank].unreserve(-change)
            else:
                self.allocators[rank].reserve(change)
        reserved[first], reserved[second] = reserved[second], reserved[first]

    def free_expired(self, window: WindowBlocks, length: int, growth_of: Callable[[int], int]) -> None:
        """Free the blocks that rows after the first `length` tokens do not see, and renew the request's reservations.

        One more block stays, so that another request can begin one block before the end of this one.

        Args:
            window: The request's blocks.
            length: Number of tokens of the request that are known.
            growth_of: Returns how many more blocks of a rank the request may get.
        """
        blocks, expired = window.blocks, self._expire(window, length)
        if not expired:
            return
        num_expired = Counter(block.owner for block in expired)
        num_owned = Counter(block.owner for block in islice(blocks, max(window.num_apart - window.first, 0), None))
        for rank, allocator in enumerate(self.allocators):
            reserved, most = window.reserved[rank], window.most_at_once
            # The request may never need blocks again of a rank on which it has none now.
            wanted = most if num_owned[rank] else reserved + num_expired[rank]
            change = max(min(wanted, most - num_owned[rank], growth_of(rank)), 0) - reserved
            change = min(change, allocator.available)
            allocator.reserve(max(change, 0))
            allocator.unreserve(max(-change, 0))
            window.reserved[rank] += change

    def _expire(self, window: WindowBlocks, length: int) -> list[Block]:
        """Take back the blocks that rows after `length` known tokens do not see, except the last one."""
        first = self.first_place(max(length - self._block_tokens, 0))
        expired = list[Block]()
        while window.first < first and window.blocks:
            expired.append(window.blocks.popleft())
            window.first += 1
        if expired:
            self.unshare(expired, expired=True)
        return expired

    def release(self, window: WindowBlocks, length: int) -> None:
        """Take back all blocks and reservations of a request with `length` known tokens."""
        self._expire(window, length)
        self.unshare(window.blocks)
        for allocator, count in zip(self.allocators, window.reserved, strict=True):
            allocator.unreserve(count)

    def name(self, window: WindowBlocks, start: int, hashes: Items[bytes]) -> None:
        """Make the full blocks findable that a request still has. `hashes` are those from the place `start` on."""
        for place in range(max(window.first, start), start + len(hashes)):
            self._name(window.blocks[place - window.first], hashes[place - start])

    def _name(self, block: Block, content_hash: bytes) -> None:
        self.allocators[block.owner].name(block.id, content_hash)
        if self._touch is not None:
            self._touch(content_hash)

    def share(self, blocks: Iterable[Block]) -> None:
        """Add a holder to blocks that have one or are cached."""
        for allocator, ids in zip(self.allocators, by_rank(blocks, self._kvp), strict=True):
            num_held = len(ids) - allocator.num_cached_of(ids)
            allocator.share(ids)
            allocator.reserve(num_held)

    def unshare(self, blocks: Iterable[Block], *, expired: bool = False) -> None:
        """Remove a holder from blocks. expired: see `BlockAllocator.release`."""
        for allocator, ids in zip(self.allocators, by_rank(blocks, self._kvp), strict=True):
            allocator.release(ids, sum(map(allocator.is_shared, ids)), expired=expired)

    def forget(self) -> None:
        """Free all cached blocks."""
        for allocator in self.allocators:
            allocator.forget()


class _Touched(NamedTuple):
    """A recorder that passes on the hash of each block that becomes findable, or is findable no longer."""

    touch: Callable[[bytes], None]

    def stored(self, tier: Tier, hashes: Iterable[bytes]) -> None:
        for content_hash in hashes:
            self.touch(content_hash)

    def removed(self, tier: Tier, content_hash: bytes) -> None:
        self.touch(content_hash)


def as_sent(blocks: tuple[Block, ...], windows: Items[Items[Block]]) -> tuple[Block, ...]:
    """Interleave the blocks of all groups as steps do: at each place, first the block of layers without a limit."""
    if not windows:
        return blocks
    return tuple(block for at_place in zip(blocks, *windows, strict=True) for block in at_place)


def with_expired(blocks: Items[Block], window: Items[Block]) -> Items[Block]:
    """Return a group's block for each place of `blocks`: expired blocks, then those of `window`."""
    return [*(Block(block.owner, EXPIRED_ID) for block in blocks[: len(blocks) - len(window)]), *window]


def with_any(blocks: tuple[Block, ...], windows: Items[KVWindow]) -> tuple[Block, ...]:
    """Return blocks as steps have them, with any blocks of the groups with a limit.

    Sequences, and places of one sequence, may share these. Only for steps whose answers nobody reads.
    """
    return as_sent(blocks, [[Block(block.owner, block.id % group.num_blocks) for block in blocks] for group in windows])
