"""Swapped KV blocks: evicted blocks of the prefix cache, whose content is kept outside of the pools."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from typing import Protocol

from longhelix.scheduler.cache_record import Tier
from longhelix.scheduler.kv.blocks import Block, CacheWatcher, Slot
from longhelix.scheduler.step import Swap, Turn


class SwapRecorder(Protocol):
    """Records which contents are in slots."""

    def stored(self, tier: Tier, hashes: Iterable[bytes]) -> None: ...

    def removed(self, tier: Tier, content_hash: bytes) -> None: ...


class Swaps:
    """The slots of all KVP ranks in a KV group, which keep the content of evicted blocks.

    A slot keeps its content after it is swapped in, since full blocks never change. If all slots are in use, the least
    recently used one is overwritten. A step swaps out before it swaps in, so it never writes to a slot that it reads.

    Args:
        num_slots: Slots of each rank.
        pool_index: Blocks in the pools by content hash.
        pays: Whether swapping a block pays, by the position of its first token. Otherwise it is computed again.
        is_reachable: For KV groups with a limit, instead of `pays`: whether a request can need a block of this hash.
        record: Records which contents are in slots, if not None.

    Attributes:
        index: Slots by content hash.
        evicted: Blocks that the next step may swap out, with their hashes, in the order of eviction.
        watcher: Watches blocks and slots, if not None.
    """

    def __init__(
        self,
        kvp: int,
        num_slots: int,
        pool_index: Mapping[bytes, Block],
        pays: Callable[[int], bool] = lambda start: True,
        record: SwapRecorder | None = None,
        group: int = 0,
        is_reachable: Callable[[bytes], bool] | None = None,
    ) -> None:
        self._is_reachable = is_reachable
        self.num_slots = num_slots
        self._group = group
        self.index: dict[bytes, Slot] = {}
        self.watcher: CacheWatcher | None = None
        self.evicted: list[tuple[Block, bytes]] = []
        self._pool_index = pool_index
        self._record = record
        self._pays = pays
        self._starts: dict[bytes, int] = {}  # first positions of blocks in the pools, by hash
        self._used: list[OrderedDict[Slot, bytes]] = [OrderedDict() for _ in range(kvp)]  # least recently used first
        self._pending: list[tuple[Slot, Block]] = []  # that the next step swaps in

    def name(self, content_hash: bytes, start: int) -> None:
        """Note that a block has become findable in its pool. start: the position of its first token."""
        if self.watcher is not None and content_hash in self.index:
            self.watcher.on_lost(self.index[content_hash])
        self._starts[content_hash] = start

    def hash_of(self, slot: Slot) -> bytes:
        """Return the hash of a slot's content."""
        return self._used[slot.owner][slot]

    def swap_in(self, slots: Items[Slot], blocks: Items[Block]) -> None:
        """Fill blocks from slots of the same ranks in the next step. Both are in position order."""
        self._pending += zip(slots, blocks, strict=True)
        for slot in reversed(slots):  # a block is found only where all before it are
            self._used[slot.owner].move_to_end(slot)

    @property
    def awaited(self) -> set[Block]:
        """The blocks that a later step will fill."""
        return {target for _, target in self._pending}

    def cancel_for(self, written: Collection[Block]) -> None:
        """Cancel swaps from and to blocks that are written before the next step."""
        self._pending = [(slot, target) for slot, target in self._pending if target not in written]
        for _, content_hash in self.evicted:
            self._start(content_hash)
        self.evicted.clear()

    def of_step(self, turn: Turn) -> tuple[tuple[Swap, ...], tuple[Swap, ...]]:
        """Return what the ranks that take the turn's step swap out and in."""
        if not (self.evicted or self._pending):
            return (), ()
        evicted, swapped_in = self._take(turn)
        read, out = {slot for slot, _ in swapped_in}, dict[Slot, Block]()
        for block, content_hash in evicted:
            start = self._start(content_hash)
            if content_hash in self.index:
                slot = self.index[content_hash]
                self._used[slot.owner].move_to_end(slot)
            elif start is not None and self._pays(start):
                free = self._slot(block.owner, read)
                if free is not None:
                    self._used[block.owner][free] = content_hash
                    self.index[content_hash] = free
                    if self._record is not None:
                        self._record.stored("swap", [content_hash])
                    out[free] = block
        return (
            tuple(Swap(block, slot.id, self._group) for slot, block in out.items()),
            tuple(Swap(block, slot.id, self._group) for slot, block in swapped_in),
        )

    def _take(self, turn: Turn) -> tuple[list[tuple[Block, bytes]], list[tuple[Slot, Block]]]:
        """Take the evicted blocks and the pending swaps of the turn's ranks off the lists."""
        evicted = [eviction for eviction in self.evicted if turn.has((eviction[0].owner,))]
        swapped_in = [swap for swap in self._pending if turn.has((swap[0].owner,))]
        # The allocators append to this list object.
        self.evicted[:] = [eviction for eviction in self.evicted if not turn.has((eviction[0].owner,))]
        self._pending = [swap for swap in self._pending if not turn.has((swap[0].owner,))]
        return evicted, swapped_in

    def _start(self, content_hash: bytes) -> int | None:
        """Return the first position of an evicted block. 0 if swapping always pays. None if another block now has the
        same content."""
        if content_hash in self._pool_index:
            return None
        if self._is_reachable is not None:
            return 0 if self._is_reachable(content_hash) else None
        return self._starts.pop(content_hash, None)

    def _slot(self, rank: int, read: set[Slot]) -> Slot | None:
        """Return a slot that may be overwritten. None if the step reads all of them."""
        used = self._used[rank]
        if len(used) < self.num_slots:
            return Slot(rank, len(used))
        slot = next(iter(used))
        if slot in read:  # and so are all slots that were used later
            return None
        if self.watcher is not None:
            self.watcher.on_lost(slot)
        content_hash = used.pop(slot)
        del self.index[content_hash]
        if self._record is not None:
            self._record.removed("swap", content_hash)
        return slot
