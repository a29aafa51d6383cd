"""Swapped KV blocks: what the prefix cache keeps outside of the pools of blocks whose room was needed."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from typing import Protocol

from longhelix.scheduler.cache_record import Tier
from longhelix.scheduler.kv.blocks import Block, CacheWatcher, Slot
from longhelix.scheduler.step import Swap, Turn


class SwapRecorder(Protocol):
    """Is told which contents are found in slots, or no longer."""

    def stored(self, tier: Tier, hashes: Iterable[bytes]) -> None: ...

    def removed(self, tier: Tier, content_hash: bytes) -> None: ...


class Swaps:
    """The slots of all KVP ranks in a KV group, `num_slots` each, for the content of blocks that were evicted.

    A slot keeps its content when it is swapped in again, since full blocks never change; where all are in use, the one
    used the longest ago is written next. A step swaps out before it swaps in, so what it reads is not written in it.

    found: the blocks in the pools, by content hash. pays: whether a block whose first token is at that position is
    worth a slot, or had better be computed again. is_reachable: for KV groups with a limit, instead of `pays`: whether
    a request can come to need a block of this hash. index: slots by content hash. evicted: blocks whose content goes
    with the next step, and its hash, the first to go first. record: None: nobody records what is found in slots.
    """

    def __init__(
        self,
        kvp: int,
        num_slots: int,
        found: Mapping[bytes, Block],
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
        self._found = found
        self._record = record
        self._pays = pays
        self._starts: dict[bytes, int] = {}  # of what is found in the pools, by hash
        self._used: list[OrderedDict[Slot, bytes]] = [OrderedDict() for _ in range(kvp)]  # the next to be written first
        self._in: list[tuple[Slot, Block]] = []  # with the next step

    def name(self, content_hash: bytes, start: int) -> None:
        """A block is found in its pool from now on. start: the position of its first token."""
        if self.watcher is not None and content_hash in self.index:
            self.watcher.lost(self.index[content_hash])
        self._starts[content_hash] = start

    def hash_of(self, slot: Slot) -> bytes:
        """Of its content."""
        return self._used[slot.owner][slot]

    def swap_in(self, slots: Items[Slot], blocks: Items[Block]) -> None:
        """Fill blocks on the owners of slots, in position order, with the next step."""
        self._in += zip(slots, blocks, strict=True)
        for slot in reversed(slots):  # a block is found only where all before it are
            self._used[slot.owner].move_to_end(slot)

    @property
    def awaited(self) -> set[Block]:
        """The blocks that get their content only with a step that is yet to be made."""
        return {target for _, target in self._in}

    def lose(self, written: Collection[Block]) -> None:
        """Blocks that were evicted are written to before the next step, which is to leave them so."""
        self._in = [one for one in self._in if one[1] not in written]
        for _, content_hash in self.evicted:
            self._start(content_hash)
        self.evicted.clear()

    def of_step(self, turn: Turn) -> tuple[tuple[Swap, ...], tuple[Swap, ...]]:
        """What those swap out and in who take the turn's step."""
        if not (self.evicted or self._in):
            return (), ()
        evicted, swapped_in = self._of(turn)
        read, out = {slot for slot, _ in swapped_in}, dict[Slot, Block]()
        for block, content_hash in evicted:
            start = self._start(content_hash)
            if content_hash in self.index:
                slot = self.index[content_hash]
                self._used[slot.owner].move_to_end(slot)
            elif start is not None and self._pays(start):
                new = self._slot(block.owner, read)
                if new is not None:
                    self._used[block.owner][new] = content_hash
                    self.index[content_hash] = new
                    if self._record is not None:
                        self._record.stored("swap", [content_hash])
                    out[new] = block
        return (
            tuple(Swap(block, slot.id, self._group) for slot, block in out.items()),
            tuple(Swap(block, slot.id, self._group) for slot, block in swapped_in),
        )

    def _of(self, turn: Turn) -> tuple[list[tuple[Block, bytes]], list[tuple[Slot, Block]]]:
        """What was evicted of them and what is swapped in, which others need no longer hear of."""
        evicted = [one for one in self.evicted if turn.has((one[0].owner,))]
        swapped_in = [one for one in self._in if turn.has((one[0].owner,))]
        # Blocks are evicted to the same list.
        self.evicted[:] = [one for one in self.evicted if not turn.has((one[0].owner,))]
        self._in = [one for one in self._in if not turn.has((one[0].owner,))]
        return evicted, swapped_in

    def _start(self, content_hash: bytes) -> int | None:
        """The first position of a block that was evicted, if that matters. None: another block has its content by
        now."""
        if content_hash in self._found:
            return None
        if self._is_reachable is not None:
            return 0 if self._is_reachable(content_hash) else None
        return self._starts.pop(content_hash, None)

    def _slot(self, rank: int, read: set[Slot]) -> Slot | None:
        """One that may be written: not `read` in the same step."""
        used = self._used[rank]
        if len(used) < self.num_slots:
            return Slot(rank, len(used))
        slot = next(iter(used))
        if slot in read:  # and so are all others, which were used later
            return None
        if self.watcher is not None:
            self.watcher.lost(slot)
        content_hash = used.pop(slot)
        del self.index[content_hash]
        if self._record is not None:
            self._record.removed("swap", content_hash)
        return slot
