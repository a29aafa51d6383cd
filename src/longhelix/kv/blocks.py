"""KV blocks: ids on each KVP rank, reserved at admission, handed out as a request grows."""

from array import array
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
    """

    num_blocks: int
    reserved: int = 0
    _num_free: int = field(init=False)
    _runs: list[_Run] = field(init=False)

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

    def release(self, ids: "array[int]", unused_reservation: int) -> None:
        """Take back a request's blocks, which become this pool's, and what it was promised but never used."""
        if ids:
            self._forget_taken()
            self._runs.append(_Run(ids))
        self._num_free += len(ids)
        self.reserved -= unused_reservation
        assert self.reserved >= 0
        assert self._num_free <= self.num_blocks

    def _forget_taken(self) -> None:
        """Before another run lies above it: a run keeps no more ids that are gone than ids that are free."""
        if self._runs and 2 * (run := self._runs[-1]).taken > len(run.ids):
            run.ids, run.taken = run.ids[run.taken :], 0
