"""KV blocks: ids on each KVP rank, reserved at admission, handed out as a request grows, shared once filled."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Block(NamedTuple):
    """One KV block: the KVP rank that keeps it and its id in that rank's pool."""

    owner: int
    id: int


@dataclass
class _Run:
    """Free ids in the order in which they are handed out, of which `taken` are gone."""

    ids: "range | array[int]"
    taken: int = 0


@dataclass
class BlockAllocator:
    """The free blocks of one KVP rank (the same ids on all its TPA ranks).

    What a request gives back stays one run, in its order, and is handed out first: blocks that follow each other in a
    sequence mostly lie so in memory, and memory that nobody has used yet is left for last.

    A block that is handed out has one holder. It may get more, and is free when the last of them has released it. Only
    what is shared or has a content hash takes memory of its own here.
    """

    num_blocks: int
    reserved: int = 0
    _num_free: int = field(init=False)
    _runs: list[_Run] = field(init=False)
    _more_holders: dict[int, int] = field(default_factory=dict, init=False)  # than one, by block
    _hashes: dict[int, bytes] = field(default_factory=dict, init=False)  # by block
    _blocks: dict[bytes, int] = field(default_factory=dict, init=False)  # by hash

    def __post_init__(self) -> None:
        self._num_free = self.num_blocks
        self._runs = [_Run(range(self.num_blocks))]

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
        run = self._runs[-1]
        block_id = run.ids[run.taken]
        run.taken += 1
        if run.taken == len(run.ids):
            self._runs.pop()
        return block_id

    def share(self, ids: Iterable[int]) -> None:
        """Add a holder to blocks that have one, who promises to `release` each of them once."""
        for block_id in ids:
            self._more_holders[block_id] = self._more_holders.get(block_id, 0) + 1

    def set_hash(self, block_id: int, content_hash: bytes) -> None:
        """Let a full block that somebody holds be found by its content until it is free. Of blocks with the same
        content the first stays the one that is found."""
        assert self._hashes.get(block_id, content_hash) == content_hash
        if self._blocks.setdefault(content_hash, block_id) == block_id:
            self._hashes[block_id] = content_hash

    def find(self, content_hash: bytes) -> int | None:
        """The block of that content, which its holders may release: `share` it first."""
        return self._blocks.get(content_hash)

    def release(self, ids: "array[int]", unused_reservation: int) -> None:
        """Take back the different blocks of one holder, and what it was promised but never used. The blocks that nobody
        else holds are free; `ids` becomes this pool's."""
        if self._more_holders:
            ids = self._unshared(ids)
        if self._hashes:
            self._forget_hashes(ids)
        if ids:
            self._forget_taken()
            self._runs.append(_Run(ids))
        self._num_free += len(ids)
        self.reserved -= unused_reservation
        assert self.reserved >= 0
        assert self._num_free <= self.num_blocks

    def _unshared(self, ids: "array[int]") -> "array[int]":
        """Of `ids` those with one holder, in their order; the others have one less."""
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
        """Before another run lies above it: a run keeps no more ids that are gone than ids that are free."""
        if self._runs and 2 * (run := self._runs[-1]).taken > len(run.ids):
            run.ids, run.taken = run.ids[run.taken :], 0
