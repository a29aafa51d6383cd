"""KV groups with a limit: layers whose rows see only a window of the tokens, or their chunk. A request has blocks of
such a group for what its next rows see, and gives back those behind.

All groups of a request have the same owners: the block at a place of its tokens lies on one KVP rank in all of them.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

from longhelix.scheduler.kv.blocks import Block, BlockAllocator, Slot, by_rank
from longhelix.spec.attention import Visibility

PASSED_ID = -1  # of a block that no row sees any longer, or that the request never had


class KVWindow(NamedTuple):
    """What rows of a group see, and the KV blocks of each KVP rank."""

    visibility: Visibility
    num_blocks: int


def span_blocks(visibility: Visibility, block_tokens: int) -> int:
    """The most blocks in a row that a request has of a group while it goes on by a block: those with tokens that its
    next row sees, one more so that others can begin one block before its end, and the next one."""
    assert visibility.limit_tokens is not None
    return -(-visibility.limit_tokens // block_tokens) + 3


@dataclass(eq=False, slots=True)
class WindowBlocks:
    """What a request has of a group.

    Attributes:
        blocks: those that it still has, in position order.
        first: how many blocks of the request come before these.
        num_shared: how many of its first blocks came from others, `first` ones included.
        promised: by KVP rank, how many it is promised and does not have.
    """

    promised: list[int]
    blocks: deque[Block] = field(default_factory=deque)
    first: int = 0
    num_shared: int = 0

    def at(self, place: int) -> Block | None:
        """The block at a place of the request. None: it has passed."""
        return self.blocks[place - self.first] if place >= self.first else None


class WindowPrefix(NamedTuple):
    """The cached blocks of a group that a request begins with: those that its next row sees, from the place `first`
    on."""

    first: int = 0
    blocks: tuple[Block, ...] = ()


class HeldWindow(NamedTuple):
    """The blocks of a group that somebody holds who is no request, from the place `first` of a prompt on. new: the
    places of those that have yet to get their KV."""

    first: int
    blocks: tuple[Block, ...]
    new: frozenset[int]

    @property
    def missing(self) -> list[Block]:
        """The blocks, where those that have their KV count as passed."""
        return [
            block if place in self.new else Block(block.owner, PASSED_ID)
            for place, block in enumerate(self.blocks, self.first)
        ]


class WindowGroup:
    """The KV blocks of one group on all KVP ranks. Each rank has an index of its own, because a request that begins
    with cached blocks needs those that lie with its other blocks.

    A request is promised as many blocks as it ever needs at once, so that hardly any loses its blocks for a window. The
    blocks of a chunk come beside that from what is free, and chunks are cut to it.

    spare: blocks of each rank that admission leaves to the chunks of a step.
    """

    def __init__(self, window: KVWindow, kvp: int, block_tokens: int, spare: int) -> None:
        self.visibility = window.visibility
        self.allocators = [BlockAllocator(window.num_blocks, rank) for rank in range(kvp)]
        self.num_blocks = window.num_blocks
        self._kvp, self._block_tokens = kvp, block_tokens
        self._span = span_blocks(window.visibility, block_tokens)
        self._spare = min(spare, window.num_blocks // 4)

    def first_place(self, position: int) -> int:
        """The place of the first block that a row at `position` sees."""
        return self.visibility.first_seen(position) // self._block_tokens

    def quota(self, needed: Items[int], *, spread: bool) -> list[int]:
        """Blocks of each rank that a request is promised, which is to have `needed` ones in all. spread: they go round
        the ranks."""
        most = -(-self._span // self._kvp) if spread else self._span
        return [min(count, most) for count in needed]

    def fits(self, quota: Items[int], prefix: WindowPrefix, *, alone: bool) -> bool:
        """Whether a request with these promises and this prefix can begin now. alone: no other one runs."""
        ids, spare = by_rank(prefix.blocks, self._kvp), 0 if alone else self._spare
        return all(
            quota[rank] + allocator.num_cached_of(ids[rank]) + spare <= allocator.available
            for rank, allocator in enumerate(self.allocators)
        )

    def find(self, first: int, others: Items[Block | Slot], hash_at: Callable[[int], bytes]) -> int | WindowPrefix:
        """The cached blocks of a prompt from the place `first` on, or the last place without one. others: its blocks of
        the layers without a limit."""
        blocks = list[Block]()
        for place in range(len(others) - 1, first - 1, -1):
            block = self.allocators[others[place].owner].index.get(hash_at(place))
            if block is None:
                return place
            blocks.append(block)
        return WindowPrefix(first, tuple(reversed(blocks)))

    def hold(self, owners: Items[int], hashes: Items[bytes]) -> HeldWindow | None:
        """Hold what a request needs that goes on behind a prompt's full blocks or at their last token: what is cached,
        and new blocks. None if these are not free. owners: those of all blocks."""
        first = self.first_place(max((len(hashes) - 1) * self._block_tokens, 0))
        found = [self.allocators[owners[place]].index.get(hashes[place]) for place in range(first, len(hashes))]
        new = [place for place, block in enumerate(found, first) if block is None]
        cached = [block for block in found if block is not None]
        ids, counts = by_rank(cached, self._kvp), Counter(owners[place] for place in new)
        if any(
            counts[rank] + allocator.num_cached_of(ids[rank]) > allocator.available
            for rank, allocator in enumerate(self.allocators)
        ):
            return None
        self.share(cached)
        blocks = tuple(
            Block(owners[place], self.allocators[owners[place]].take()) if block is None else block
            for place, block in enumerate(found, first)
        )
        return HeldWindow(first, blocks, frozenset(new))

    def publish(self, held: HeldWindow, hashes: Items[bytes]) -> None:
        """All blocks have their KV: let them be found."""
        for place in held.new:
            block = held.blocks[place - held.first]
            self.allocators[block.owner].name(block.id, hashes[place])

    def has(self, blocks: Items[Block | Slot], hashes: Items[bytes]) -> bool:
        """Whether all that `hold` would hold is cached; then it is the last to be evicted. blocks: those of the layers
        without a limit."""
        first = self.first_place(max((len(hashes) - 1) * self._block_tokens, 0))
        found = self.find(first, blocks, hashes.__getitem__)
        if not isinstance(found, WindowPrefix):
            return False
        for allocator, ids in zip(self.allocators, by_rank(found.blocks, self._kvp), strict=True):
            allocator.refresh(ids)
        return True

    def begin(self, quota: list[int], prefix: WindowPrefix, full: int) -> WindowBlocks:
        """A request holds the first blocks of its prefix from now on, those before the place `full`, and is promised
        others."""
        shared = prefix.blocks[: max(full - prefix.first, 0)]
        self.share(shared)
        for allocator, count in zip(self.allocators, quota, strict=True):
            allocator.reserve(count)
        return WindowBlocks(quota, deque(shared), min(prefix.first, full), full)

    def has_room(self, held: WindowBlocks, rank: int) -> bool:
        """Whether a request can have one more block of a rank."""
        return bool(held.promised[rank]) or self.allocators[rank].available > 0

    def room(self, held: WindowBlocks) -> list[int]:
        """How many more blocks a request can have now, by rank."""
        return [count + allocator.available for count, allocator in zip(held.promised, self.allocators, strict=True)]

    def take(self, held: WindowBlocks, rank: int) -> Block:
        """A request's next block, on a rank that has room."""
        allocator = self.allocators[rank]
        if held.promised[rank]:
            held.promised[rank] -= 1
            block = Block(rank, allocator.take_reserved())
        else:
            block = Block(rank, allocator.take())
        held.blocks.append(block)
        return block

    def can_swap(self, held: WindowBlocks, one: int, other: int) -> bool:
        """Whether a request can be promised of each of two ranks what it is promised of the other one."""
        room = self.room(held)
        return held.promised[one] <= room[other] and held.promised[other] <= room[one]

    def swap(self, held: WindowBlocks, one: int, other: int) -> None:
        """A request is promised of each of two ranks what it was promised of the other one."""
        promised = held.promised
        for rank, more in ((one, promised[other] - promised[one]), (other, promised[one] - promised[other])):
            if more < 0:
                self.allocators[rank].unreserve(-more)
            else:
                self.allocators[rank].reserve(more)
        promised[one], promised[other] = promised[other], promised[one]

    def pass_by(self, held: WindowBlocks, length: int, *, spread: bool) -> None:
        """Take back the blocks that no row sees any longer which comes after `length` known tokens. One block more
        stays, so that others can begin before the last one. What was its own is promised to the request again, where
        it goes on. spread: see `quota`."""
        first = self.first_place(max(length - self._block_tokens, 0))
        blocks, passed = held.blocks, list[Block]()
        while held.first < first and blocks:
            passed.append(blocks.popleft())
            held.first += 1
        if not passed:
            return
        own_from = max(held.num_shared - (held.first - len(passed)), 0)
        self.unshare(passed)
        last_owner = blocks[-1].owner if blocks else passed[-1].owner
        for block in passed[own_from:]:
            allocator = self.allocators[block.owner]
            if allocator.available and (spread or block.owner == last_owner):
                allocator.reserve(1)
                held.promised[block.owner] += 1

    def release(self, held: WindowBlocks) -> None:
        """Take back all that a request has and was promised."""
        self.unshare(held.blocks)
        for allocator, count in zip(self.allocators, held.promised, strict=True):
            allocator.unreserve(count)

    def name(self, held: WindowBlocks, start: int, hashes: Items[bytes]) -> None:
        """Let a request's full blocks be found by their hashes, from the place `start` on, where it still has them."""
        for place in range(max(held.first, start), start + len(hashes)):
            block = held.blocks[place - held.first]
            self.allocators[block.owner].name(block.id, hashes[place - start])

    def share(self, blocks: Iterable[Block]) -> None:
        """Add a holder to blocks that have one or are cached."""
        for allocator, ids in zip(self.allocators, by_rank(blocks, self._kvp), strict=True):
            allocator.share(ids)

    def unshare(self, blocks: Iterable[Block]) -> None:
        """Take a holder from blocks."""
        for allocator, ids in zip(self.allocators, by_rank(blocks, self._kvp), strict=True):
            allocator.release(ids, 0)

    def forget(self) -> None:
        """Let all cached blocks be free."""
        for allocator in self.allocators:
            allocator.forget()


def as_sent(blocks: tuple[Block, ...], windows: Items[Items[Block]]) -> tuple[Block, ...]:
    """Blocks of a request as steps have them: at each place one of each group, that of layers without a limit first."""
    if not windows:
        return blocks
    return tuple(block for at_place in zip(blocks, *windows, strict=True) for block in at_place)


def passed(blocks: Items[Block], held: Items[Block]) -> Items[Block]:
    """Blocks of a group, for as many places as `blocks` has: those at the end are `held`, the others have passed."""
    return [*(Block(block.owner, PASSED_ID) for block in blocks[: len(blocks) - len(held)]), *held]


def with_any(blocks: tuple[Block, ...], windows: Items[KVWindow]) -> tuple[Block, ...]:
    """Blocks as steps have them, where sequences, and places of one, may share blocks of groups with a limit. For
    steps whose answers nobody reads."""
    return as_sent(blocks, [[Block(block.owner, block.id % each.num_blocks) for block in blocks] for each in windows])
