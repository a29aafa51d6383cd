"""KV blocks: ids on each KVP rank, reserved at admission, handed out as a request grows, shared once filled."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

# Live sequences together list so many ids at most for each block of a pool, which is 1 without blocks that they share.
IDS_PER_BLOCK = 4


class Block(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One KV block: the KVP rank that keeps it and its id in that rank's pool."""

    owner: int
    id: int


@dataclass
class _FreeIds:
    """Ids that were freed together, in the order in which they are handed out; the first `taken` are handed out."""

    ids: "range | array[int]"
    taken: int = 0


@dataclass
class BlockAllocator:
    """The free blocks of one KVP rank (the same ids on all its TPA ranks).

    Blocks that a request gives back stay together, in their order, and are handed out first. So blocks that follow each
    other in a sequence mostly do so in memory, and memory that nobody has used yet is used last.

    A block that is handed out has one holder. It may get more, and is free once the last of them has released it. Only
    blocks that are shared or have a content hash take memory of their own here.
    """

    num_blocks: int
    reserved: int = 0
    _num_free: int = field(init=False)
    _free: list[_FreeIds] = field(init=False)
    _more_holders: dict[int, int] = field(default_factory=dict, init=False)  # than one, by block
    _hashes: dict[int, bytes] = field(default_factory=dict, init=False)  # by block
    _blocks: dict[bytes, int] = field(default_factory=dict, init=False)  # by hash

    def __post_init__(self) -> None:
        self._num_free = self.num_blocks
        self._free = [_FreeIds(range(self.num_blocks))]

    @property
    def available(self) -> int:
        """Blocks neither handed out nor promised."""
        return self._num_free - self.reserved

    def reserve(self, count: int) -> None:
        """Promise `count` blocks to a request, so that growing can never fail."""
        assert count <= self.available
        self.reserved += count

    def take_reserved(self) -> int:
        """Hand out one promised block."""
        assert self.reserved > 0
        self.reserved -= 1
        self._num_free -= 1
        free = self._free[-1]
        block_id = free.ids[free.taken]
        free.taken += 1
        if free.taken == len(free.ids):
            self._free.pop()
        return block_id

    def share(self, ids: Iterable[int]) -> None:
        """Add a holder to blocks that have one, who promises to `release` each of them once."""
        for block_id in ids:
            self._more_holders[block_id] = self._more_holders.get(block_id, 0) + 1

    def set_hash(self, block_id: int, content_hash: bytes) -> None:
        """Let a full block that somebody holds be found by its content until it is free. Of several blocks with the
        same content, `find` gives the first."""
        assert self._hashes.get(block_id, content_hash) == content_hash
        if self._blocks.setdefault(content_hash, block_id) == block_id:
            self._hashes[block_id] = content_hash

    def find(self, content_hash: bytes) -> int | None:
        """The block with that content. Call `share` before its holders release it."""
        return self._blocks.get(content_hash)

    def release(self, ids: "array[int]", unused_reservation: int) -> None:
        """Take back the blocks of one holder, each once, and what it was promised but never used. Blocks that nobody
        else holds become free. The allocator keeps `ids`."""
        if self._more_holders:
            ids = self._unshared(ids)
        if self._hashes:
            self._forget_hashes(ids)
        if ids:
            self._forget_taken()
            self._free.append(_FreeIds(ids))
        self._num_free += len(ids)
        self.reserved -= unused_reservation
        assert self.reserved >= 0
        assert self._num_free <= self.num_blocks

    def _unshared(self, ids: "array[int]") -> "array[int]":
        """Those of `ids` with one holder, in their order. The others lose a holder."""
        shared = self._more_holders.keys() & ids
        for block_id in shared:
            self._more_holders[block_id] -= 1
            if not self._more_holders[block_id]:
                del self._more_holders[block_id]
        return array("q", [block_id for block_id in ids if block_id not in shared]) if shared else ids

    def _forget_hashes(self, ids: "array[int]") -> None:
        for block_id in self._hashes.keys() & ids:
            del self._blocks[self._hashes.pop(block_id)]

    def _forget_taken(self) -> None:
        """Before other ids go on top of them: drop the taken ids, where these are more than the free ones."""
        if self._free and 2 * (free := self._free[-1]).taken > len(free.ids):
            free.ids, free.taken = free.ids[free.taken :], 0
