"""KV blocks: ids on each KVP rank, reserved at admission, handed out as a request grows."""

from array import array
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Block:
    """One KV block: the KVP rank that keeps it and its id in that rank's pool."""

    owner: int
    id: int


@dataclass
class BlockAllocator:
    """The free blocks of one KVP rank (the same ids on all its TPA ranks)."""

    num_blocks: int
    reserved: int = 0
    _free: "array[int]" = field(init=False)

    def __post_init__(self) -> None:
        self._free = array("q", range(self.num_blocks - 1, -1, -1))

    @property
    def available(self) -> int:
        """Blocks neither handed out nor promised."""
        return len(self._free) - self.reserved

    def reserve(self, count: int) -> None:
        """Promise `count` blocks to a request, so that growing can never fail."""
        assert count <= self.available
        self.reserved += count

    def take_reserved(self) -> int:
        """Hand out one promised block."""
        assert self.reserved > 0
        self.reserved -= 1
        return self._free.pop()

    def release(self, ids: "array[int]", unused_reservation: int) -> None:
        """Take back a request's blocks and what it was promised but never used."""
        self._free.extend(ids[::-1])
        self.reserved -= unused_reservation
        assert self.reserved >= 0
        assert len(self._free) <= self.num_blocks
