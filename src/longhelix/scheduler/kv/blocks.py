"""KV blocks: ids on each KVP rank, reserved at admission, handed out as a request grows, shared once filled."""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

# Live sequences together list so many ids at most for each block of a pool, which is 1 without blocks that they share.
IDS_PER_BLOCK = 4
_NO_IDS = range(0)


class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One KV block: the KVP rank that keeps it and its id in that rank's pool."""

    owner: int
    id: int


class Slot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a KVP rank keeps a KV block's content outside of its pool."""

    owner: int
    id: int


class CacheRecorder(Protocol):
    """Is told which contents of blocks are found no longer."""

    def removed(self, tier: Literal["pool"], content_hash: bytes) -> None: ...


class CacheWatcher(Protocol):
    """Is told what happens to blocks that can be found by their content."""

    def taken_up(self, rank: int, ids: Iterable[int]) -> None:
        """Blocks that nobody held are held now."""
        ...

    def let_go(self, rank: int, ids: Iterable[int]) -> None:
        """Nobody holds these blocks any longer. They keep their content."""
        ...

    def lost(self, block: Block | Slot) -> None:
        """A block's content will no longer be found there."""
        ...


@dataclass(slots=True)
class _FreeIds:
    """Ids that were freed together, in the order in which they are handed out; the first `taken` are handed out."""

    ids: "range | array[int]"
    taken: int = 0


@dataclass
class BlockAllocator:
    """The KV blocks of one KVP rank that nobody holds (the same ids on all its TPA ranks).

    Blocks that a request gives back stay together, in their order, and are handed out first. So blocks that follow each
    other in a sequence mostly do so in memory, and memory that nobody has used yet is used last.

    A block that is handed out has one holder. It may get more, and nobody holds it once the last of them has released
    it. A block with a content hash is *cached* from then on: it keeps its content, to be shared again, until all free
    blocks are handed out and it is the one released the longest ago. Only blocks that are shared or have a hash take
    memory of their own here. Cached blocks that have `passed` are handed out before others.

    index: blocks by content hash, of all ranks whose allocators have the same one. evicted: where cached blocks are
    noted when they are handed out, with their hashes, but for those that have passed; None: nobody wants to know.
    watcher, record: None: nobody watches, or records.
    """

    num_blocks: int
    rank: int = 0
    index: dict[bytes, Block] = field(default_factory=dict)
    evicted: list[tuple[Block, bytes]] | None = None
    watcher: CacheWatcher | None = None
    record: CacheRecorder | None = None
    reserved: int = 0
    _num_free: int = field(init=False)
    _free: list[_FreeIds] = field(init=False)
    _more_holders: dict[int, int] = field(default_factory=dict, init=False)  # than one, by block
    _hashes: dict[int, bytes] = field(default_factory=dict, init=False)  # by block
    _cached: OrderedDict[int, None] = field(default_factory=OrderedDict, init=False)  # the next to be handed out first
    _passed: OrderedDict[int, None] = field(default_factory=OrderedDict, init=False)  # likewise, and before those

    def __post_init__(self) -> None:
        self._num_free = self.num_blocks
        self._free = [_FreeIds(range(self.num_blocks))]

    @property
    def available(self) -> int:
        """Blocks neither held nor promised."""
        return self._num_free + self.num_cached - self.reserved

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self._num_free - self.num_cached

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that keep their content."""
        return len(self._cached) + len(self._passed)

    def reserve(self, count: int) -> None:
        """Promise `count` blocks to a request, so that it cannot fail to get them."""
        assert count <= self.available
        self.reserved += count

    def unreserve(self, count: int) -> None:
        """Take back a promise of `count` blocks."""
        self.reserved -= count
        assert self.reserved >= 0

    def take_reserved(self) -> int:
        """Hand out one promised block."""
        assert self.reserved > 0
        self.reserved -= 1
        return self._take()

    def take(self) -> int:
        """Hand out one block that is promised to nobody."""
        assert self.available > 0
        return self._take()

    def take_many(self, count: int, reserved: int) -> Sequence[int]:
        """Hand out blocks, of which `reserved` are promised ones."""
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
        """At most so many of the free blocks that were given back together."""
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
        """The cached block that is the next to be handed out."""
        cached = self._passed or self._cached
        block_id = next(iter(cached))
        if self.watcher is not None:
            self.watcher.lost(Block(self.rank, block_id))
        del cached[block_id]
        content_hash = self._forget_hash(block_id)
        if self.evicted is not None and cached is self._cached:
            self.evicted.append((Block(self.rank, block_id), content_hash))
        return block_id

    def is_cached(self, block_id: int) -> bool:
        """Whether nobody holds it, and it keeps its content."""
        return block_id in self._cached or block_id in self._passed

    def refresh(self, ids: Sequence[int]) -> None:
        """Let those of these blocks that nobody holds be the last to be evicted, as if they were released now."""
        for block_id in reversed(ids):
            if block_id in self._passed:
                del self._passed[block_id]
                self._cached[block_id] = None
            elif block_id in self._cached:
                self._cached.move_to_end(block_id)

    def num_cached_of(self, ids: Iterable[int]) -> int:
        """How many of these blocks nobody holds, and keep their content."""
        return sum(map(self.is_cached if self._passed else self._cached.__contains__, ids))

    def is_shared(self, block_id: int) -> bool:
        """Whether it has more than one holder."""
        return block_id in self._more_holders

    def hash_of(self, block_id: int) -> bytes | None:
        """The content hash under which it is found."""
        return self._hashes.get(block_id)

    def name(self, block_id: int, content_hash: bytes) -> None:
        """Let a full block that somebody holds be found by its content, if no other one is."""
        block = Block(self.rank, block_id)
        if self.index.setdefault(content_hash, block) == block:
            self._hashes[block_id] = content_hash

    def share(self, ids: Iterable[int]) -> None:
        """Add a holder to blocks that have one or are cached, who promises to `release` each of them once."""
        cached, passed, more_holders, taken_up = self._cached, self._passed, self._more_holders, list[int]()
        for block_id in ids:
            if block_id in cached:
                del cached[block_id]
                taken_up.append(block_id)
            elif block_id in passed:
                del passed[block_id]
                taken_up.append(block_id)
            else:
                more_holders[block_id] = more_holders.get(block_id, 0) + 1
        if self.watcher is not None:
            self.watcher.taken_up(self.rank, taken_up)
        assert self.available >= 0

    def release(self, ids: "array[int]", unused_reservation: int, *, passed: bool = False) -> None:
        """Take back the blocks of one holder, each once, in the order of its sequence, and what it was promised but
        never used. The allocator keeps `ids`. passed: the holder goes on without them."""
        if self._more_holders:
            ids = self._unshared(ids)
        if self._hashes:
            ids = self._uncached(ids, self._passed if passed else self._cached)
        if ids:
            self._forget_taken()
            self._free.append(_FreeIds(ids))
        self._num_free += len(ids)
        self.reserved -= unused_reservation
        assert self.reserved >= 0
        assert self._num_free + self.num_cached <= self.num_blocks

    def forget(self) -> None:
        """Let all cached blocks be free."""
        self.uncache(array("q", [*self._passed, *self._cached]))

    def uncache(self, ids: "array[int]") -> None:
        """Let cached blocks be free. The allocator keeps `ids`."""
        for block_id in ids:
            if self.watcher is not None:
                self.watcher.lost(Block(self.rank, block_id))
            del (self._cached if block_id in self._cached else self._passed)[block_id]
            self._forget_hash(block_id)
        self.release(ids, 0)

    def _forget_hash(self, block_id: int) -> bytes:
        """Let a block be found no longer. Returns its hash."""
        content_hash = self._hashes.pop(block_id)
        del self.index[content_hash]
        if self.record is not None:
            self.record.removed("pool", content_hash)
        return content_hash

    def _unshared(self, ids: "array[int]") -> "array[int]":
        """Those of `ids` with one holder, in their order. The others lose a holder."""
        shared = self._more_holders.keys() & ids
        for block_id in shared:
            self._more_holders[block_id] -= 1
            if not self._more_holders[block_id]:
                del self._more_holders[block_id]
        return array("q", [block_id for block_id in ids if block_id not in shared]) if shared else ids

    def _uncached(self, ids: "array[int]", cached_in: OrderedDict[int, None]) -> "array[int]":
        """Those of `ids` without a hash, in their order. The others are cached: a sequence's last ones go first,
        because a block is found only where all before it are."""
        if self._hashes.keys().isdisjoint(ids):
            return ids
        cached = [block_id for block_id in reversed(ids) if block_id in self._hashes]
        cached_in.update(dict.fromkeys(cached))
        if self.watcher is not None:
            self.watcher.let_go(self.rank, cached)
        if len(cached) == len(ids):
            return array("q")
        return array("q", [block_id for block_id in ids if block_id not in self._hashes])

    def _forget_taken(self) -> None:
        """Before other ids go on top of them: drop the taken ids, where these are more than the free ones."""
        if self._free and 2 * (free := self._free[-1]).taken > len(free.ids):
            free.ids, free.taken = free.ids[free.taken :], 0


def kept(blocks: Sequence[Block | Slot]) -> tuple[Block, ...]:
    """Those that are not swapped."""
    return tuple([block for block in blocks if isinstance(block, Block)])


def by_rank(blocks: Iterable[Block], num_ranks: int) -> "list[array[int]]":
    """The ids of the blocks that each KVP rank has, in order."""
    ids = [array("q") for _ in range(num_ranks)]
    append = [of_rank.append for of_rank in ids]
    for block in blocks:
        append[block.owner](block.id)
    return ids


def set_hashes(allocators: Sequence[BlockAllocator], blocks: Iterable[Block], hashes: Sequence[bytes]) -> None:
    """Let full blocks that somebody holds be found by their content. `allocators`: by rank, which have one index. Of
    several blocks with the same content the first is found, and only that one is cached."""
    find = allocators[0].index.setdefault
    for index, block in enumerate(blocks):
        content_hash = hashes[index]
        of_rank = allocators[block.owner]._hashes
        assert of_rank.get(block.id, content_hash) == content_hash
        if find(content_hash, block) == block:
            of_rank[block.id] = content_hash
