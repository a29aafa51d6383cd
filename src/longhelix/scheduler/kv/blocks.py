"""KV blocks: admission reserves them on each KVP rank, a growing request takes them, and full ones can be shared."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

# The most ids that live sequences together may list for each block of a pool. Without shared blocks they list one.
IDS_PER_BLOCK = 4
_NO_IDS = range(0)


class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One KV block: the KVP rank that owns it, and its id in that rank's pool."""

    owner: int
    id: int


class Slot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A place outside of a KVP rank's pool where the rank keeps the content of a KV block."""

    owner: int
    id: int


class CacheRecorder(Protocol):
    """Records which contents of blocks are findable no longer."""

    def removed(self, tier: Literal["pool"], content_hash: bytes) -> None: ...


class CacheWatcher(Protocol):
    """Watches blocks that can be found by their content."""

    def on_taken(self, rank: int, ids: Iterable[int]) -> None:
        """Called when cached blocks get a holder."""
        ...

    def on_released(self, rank: int, ids: Iterable[int]) -> None:
        """Called when blocks lose their last holder and keep their content."""
        ...

    def on_lost(self, block: Block | Slot) -> None:
        """Called when a block loses its content."""
        ...


@dataclass(slots=True)
class _FreeIds:
    """Ids that were freed together, in the order in which they are handed out.

    Attributes:
        ids: All of them.
        taken: Number of ids at the start that have been handed out.
    """

    ids: "range | array[int]"
    taken: int = 0


@dataclass
class BlockAllocator:
    """Allocates the KV blocks of one KVP rank. The ids are the same on all of its TPA ranks.

    Blocks that a request releases stay together, in their order, and are handed out first. So consecutive blocks of a
    sequence are mostly consecutive in memory, and memory that was never used is used last.

    A block that is handed out has one holder, and may get more. When the last holder releases a block that has a
    content hash, the block is *cached*: it keeps its content and can be shared again. Cached blocks are evicted when no
    free blocks are left: first the expired ones, then the others, each in the order of their release. Only blocks that
    are shared or have a hash take memory in the allocator.

    Attributes:
        num_blocks: Blocks of the rank.
        rank: The KVP rank.
        index: Blocks by content hash. Allocators of several ranks may have the same index.
        evicted: Collects evicted blocks with their hashes, without expired ones. None if they are not needed.
        watcher: Watches blocks with a hash, if not None.
        record: Records removed contents, if not None.
        reserved: Blocks that are reserved and not handed out yet.
    """

    num_blocks: int
    rank: int = 0
    index: dict[bytes, Block] = field(default_factory=dict)
    evicted: list[tuple[Block, bytes]] | None = None
    watcher: CacheWatcher | None = None
    record: CacheRecorder | None = None
    reserved: int = 0
    # Number of free blocks, which are neither held nor cached.
    _num_free: int = field(init=False)
    # Their ids, in groups that were freed together. The last group is handed out first.
    _free: list[_FreeIds] = field(init=False)
    # How many holders a shared block has beyond one, by block id.
    _extra_holders: dict[int, int] = field(default_factory=dict, init=False)
    # Content hashes of the blocks that can be found, by block id.
    _hashes: dict[int, bytes] = field(default_factory=dict, init=False)
    # Ids of cached blocks that are not expired. The first one is evicted first.
    _cached: OrderedDict[int, None] = field(default_factory=OrderedDict, init=False)
    # Ids of expired blocks, in the same order. They are evicted before `_cached`.
    _expired: OrderedDict[int, None] = field(default_factory=OrderedDict, init=False)

    def __post_init__(self) -> None:
        self._num_free = self.num_blocks
        self._free = [_FreeIds(range(self.num_blocks))]

    @property
    def available(self) -> int:
        """Number of blocks that are neither held nor reserved."""
        return self._num_free + self.num_cached - self.reserved

    @property
    def num_held(self) -> int:
        """Number of blocks that have a holder."""
        return self.num_blocks - self._num_free - self.num_cached

    @property
    def num_cached(self) -> int:
        """Number of blocks that have no holder and keep their content."""
        return len(self._cached) + len(self._expired)

    def reserve(self, count: int) -> None:
        """Reserve `count` blocks for a request, so that it cannot fail to get them."""
        assert count <= self.available
        self.reserved += count

    def unreserve(self, count: int) -> None:
        """Cancel the reservation of `count` blocks."""
        self.reserved -= count
        assert self.reserved >= 0

    def take_reserved(self) -> int:
        """Hand out one reserved block."""
        assert self.reserved > 0
        self.reserved -= 1
        return self._take()

    def take(self) -> int:
        """Hand out one block that is not reserved."""
        assert self.available > 0
        return self._take()

    def take_many(self, count: int, reserved: int) -> Sequence[int]:
        """Hand out `count` blocks. `reserved` of them are reserved ones."""
        assert reserved <= self.reserved
        assert count == reserved or count - reserved <= self.available
        self.reserved -= reserved
        ids = self._take_free(count)
        if len(ids) < count:
            ids = array("q", ids)
            while self._num_free and len(ids) < count:
                ids.extend(self._take_free(count - len(ids)))
            while len(ids) < count:
                ids.append(self._evict())
        return ids

    def _take_free(self, most: int) -> "range | array[int]":
        """Hand out at most `most` of the free blocks that were released last together."""
        if not self._num_free:
            return _NO_IDS
        free = self._free[-1]
        ids = free.ids[free.taken : free.taken + most]
        free.taken += len(ids)
        self._num_free -= len(ids)
        if free.taken == len(free.ids):
            self._free.pop()
        return ids

    def _take(self) -> int:
        if not self._num_free:
            return self._evict()
        self._num_free -= 1
        free = self._free[-1]
        block_id = free.ids[free.taken]
        free.taken += 1
        if free.taken == len(free.ids):
            self._free.pop()
        return block_id

    def _evict(self) -> int:
        """Evict the next cached block and return its id."""
        cached = self._expired or self._cached
        block_id = next(iter(cached))
        if self.watcher is not None:
            self.watcher.on_lost(Block(self.rank, block_id))
        del cached[block_id]
        content_hash = self._forget_hash(block_id)
        if self.evicted is not None and cached is self._cached:
            self.evicted.append((Block(self.rank, block_id), content_hash))
        return block_id

    def is_cached(self, block_id: int) -> bool:
        """Return whether a block has no holder and keeps its content."""
        return block_id in self._cached or block_id in self._expired

    def refresh(self, ids: Sequence[int]) -> None:
        """Make the cached ones of these blocks the last ones to be evicted, as if they were released now."""
        for block_id in reversed(ids):
            if block_id in self._expired:
                del self._expired[block_id]
                self._cached[block_id] = None
            elif block_id in self._cached:
                self._cached.move_to_end(block_id)

    def num_cached_of(self, ids: Iterable[int]) -> int:
        """Return how many of these blocks are cached."""
        return sum(map(self.is_cached if self._expired else self._cached.__contains__, ids))

    def is_shared(self, block_id: int) -> bool:
        """Return whether a block has more than one holder."""
        return block_id in self._extra_holders

    def hash_of(self, block_id: int) -> bytes | None:
        """Return the content hash by which a block is found. None if it has none."""
        return self._hashes.get(block_id)

    def name(self, block_id: int, content_hash: bytes) -> None:
        """Make a full block that has a holder findable by its content, unless another block has the same content."""
        block = Block(self.rank, block_id)
        if self.index.setdefault(content_hash, block) == block:
            self._hashes[block_id] = content_hash

    def share(self, ids: Iterable[int]) -> None:
        """Add a holder to blocks that have one or are cached. The holder must `release` each of them once."""
        cached, expired, extra_holders, revived = self._cached, self._expired, self._extra_holders, list[int]()
        for block_id in ids:
            if block_id in cached:
                del cached[block_id]
                revived.append(block_id)
            elif block_id in expired:
                del expired[block_id]
                revived.append(block_id)
            else:
                extra_holders[block_id] = extra_holders.get(block_id, 0) + 1
        if self.watcher is not None:
            self.watcher.on_taken(self.rank, revived)
        assert self.available >= 0

    def release(self, ids: "array[int]", unused_reservation: int, *, expired: bool = False) -> None:
        """Remove the holder of blocks.

        Args:
            ids: Each block once, in the order of the holder's sequence. The allocator keeps this array.
            unused_reservation: Number of blocks that were reserved for the holder and never used.
            expired: Whether the holder continues without these blocks, which are then evicted first.
        """
        if self._extra_holders:
            ids = self._unshared(ids)
        if self._hashes:
            ids = self._uncached(ids, self._expired if expired else self._cached)
        if ids:
            self._forget_taken()
            self._free.append(_FreeIds(ids))
        self._num_free += len(ids)
        self.reserved -= unused_reservation
        assert self.reserved >= 0
        assert self._num_free + self.num_cached <= self.num_blocks

    def forget(self) -> None:
        """Free all cached blocks."""
        self.uncache(array("q", [*self._expired, *self._cached]))

    def uncache(self, ids: "array[int]") -> None:
        """Free cached blocks. The allocator keeps `ids`."""
        for block_id in ids:
            if self.watcher is not None:
                self.watcher.on_lost(Block(self.rank, block_id))
            del (self._cached if block_id in self._cached else self._expired)[block_id]
            self._forget_hash(block_id)
        self.release(ids, 0)

    def _forget_hash(self, block_id: int) -> bytes:
        """Make a block unfindable, and return its hash."""
        content_hash = self._hashes.pop(block_id)
        del self.index[content_hash]
        if self.record is not None:
            self.record.removed("pool", content_hash)
        return content_hash

    def _unshared(self, ids: "array[int]") -> "array[int]":
        """Remove a holder from the shared blocks of `ids`, and return the other ids in their order."""
        shared = self._extra_holders.keys() & ids
        for block_id in shared:
            self._extra_holders[block_id] -= 1
            if not self._extra_holders[block_id]:
                del self._extra_holders[block_id]
        return array("q", [block_id for block_id in ids if block_id not in shared]) if shared else ids

    def _uncached(self, ids: "array[int]", cached_in: OrderedDict[int, None]) -> "array[int]":
        """Cache the blocks of `ids` that have a hash, and return the other ids in their order.

        The last blocks of a sequence are evicted first, because a block is found only if all blocks before it are.
        """
        if self._hashes.keys().isdisjoint(ids):
            return ids
        cached = [block_id for block_id in reversed(ids) if block_id in self._hashes]
        cached_in.update(dict.fromkeys(cached))
        if self.watcher is not None:
            self.watcher.on_released(self.rank, cached)
        if len(cached) == len(ids):
            return array("q")
        return array("q", [block_id for block_id in ids if block_id not in self._hashes])

    def _forget_taken(self) -> None:
        """Drop the taken ids at the top of the free list, if they are more than the free ids there."""
        if self._free and 2 * (free := self._free[-1]).taken > len(free.ids):
            free.ids, free.taken = free.ids[free.taken :], 0


def kept(blocks: Sequence[Block | Slot]) -> tuple[Block, ...]:
    """Return the blocks that are not swapped."""
    return tuple([block for block in blocks if isinstance(block, Block)])


def by_rank(blocks: Iterable[Block], num_ranks: int) -> "list[array[int]]":
    """Return the ids of the blocks of each KVP rank, in order."""
    ids = [array("q") for _ in range(num_ranks)]
    append = [of_rank.append for of_rank in ids]
    for block in blocks:
        append[block.owner](block.id)
    return ids


def set_hashes(allocators: Sequence[BlockAllocator], blocks: Iterable[Block], hashes: Sequence[bytes]) -> None:
    """Make full blocks that have a holder findable by their content.

    If several blocks have the same content, only the first one is findable and can be cached.

    allocators: the allocator of each rank. All of them have the same index.
    """
    find = allocators[0].index.setdefault
    for index, block in enumerate(blocks):
        content_hash = hashes[index]
        of_rank = allocators[block.owner]._hashes
        assert of_rank.get(block.id, content_hash) == content_hash
        if find(content_hash, block) == block:
            of_rank[block.id] = content_hash
