"""KV groups with a limit: layers whose rows see only a window of the tokens, or their chunk. A request has blocks of
such a group for what its next rows see, and gives back those behind.

All groups of a request have the same owners: the block at a place of its tokens lies on one KVP rank in all of them.
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

PASSED_ID = -1  # of a block that no row sees any longer, or that the request never had


class KVWindow(NamedTuple):
    """What rows of a group see, and the KV blocks of each KVP rank. num_slots: slots of each KVP rank for the content
    of evicted blocks."""

    visibility: Visibility
    num_blocks: int
    num_slots: int = 0


def span_blocks(visibility: Visibility, block_tokens: int) -> int:
    """The most blocks in a row that a request has of a group while it goes on by a block: those with tokens that its
    next row sees, one more so that others can begin one block before its end, and the next one."""
    assert visibility.limit_tokens is not None
    return -(-visibility.limit_tokens // block_tokens) + 3


@dataclass(eq=False, slots=True)
class WindowBlocks:
    """What a request has of a group.

    Attributes:
        most: how many it needs at once of a KVP rank at the most, but for chunks.
        promised: by KVP rank, how many it is promised and does not have.
        blocks: those that it still has, in position order.
        first: how many blocks of the request come before these.
        num_apart: how many of its first blocks, `first` ones included, do not count among those that it needs at once,
            because others have placed them in another way.
    """

    most: int
    promised: list[int]
    blocks: deque[Block] = field(default_factory=deque)
    first: int = 0
    num_apart: int = 0


class WindowPrefix(NamedTuple):
    """The cached blocks of a group that a request begins with: those that its next row sees, from the place `first`
    on. Where these are swapped, their slots."""

    first: int = 0
    blocks: tuple[Block | Slot, ...] = ()

    def full_blocks(self, full: int) -> tuple[Block | Slot, ...]:
        """Those of its blocks before the place `full`."""
        return self.blocks[: max(full - self.first, 0)]


class HeldWindow(NamedTuple):
    """Blocks of a group that a saved context holds while it is written or loaded.

    Attributes:
        first: the place in the prompt of the first block.
        new: the places of the blocks that do not have their KV yet.
    """

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
    with cached blocks needs those that lie with its other blocks. So do the slots of each rank.

    At admission, a request gets a promise for all blocks that it needs at the same time, so requests are rarely
    preempted because of windows. Chunks also use free blocks, and the scheduler shortens a chunk if too few are free.
    A block that several requests share counts once for each of them. So a request that gives back a block can always be
    promised another one.

    spare: number of blocks on each rank that admission keeps free for the chunks of a step.
    group: number of the group.
    is_reachable: returns whether the layers without a limit still have a block with this hash.
    touch: called with the hash of each block that may be found from now on, or no longer.
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

    def promises(self, new: Items[int], prefix: WindowPrefix, full: int, placement: Placement) -> list[int]:
        """Return how many blocks of each rank a request is promised at admission.

        Args:
            new: number of new blocks that the request's prompt needs on each rank.
            prefix: the cached blocks that the request begins with.
            full: number of full blocks in the whole prefix.
        """
        most, blocks = self.most_at_once(placement), prefix.full_blocks(full)
        swapped = Counter(block.owner for block in blocks if isinstance(block, Slot))
        if not placement.even:  # blocks that others have placed come on top of those that it needs at once
            return [min(count, most) + swapped[rank] for rank, count in enumerate(new)]
        have = Counter(block.owner for block in kept(blocks))
        return [min(count + swapped[rank], max(most - have[rank], 0)) for rank, count in enumerate(new)]

    def fits(self, promises: Items[int], prefix: WindowPrefix, *, alone: bool) -> bool:
        """Whether a request with these promises and this prefix can begin now. alone: no other one runs."""
        ids, spare = by_rank(kept(prefix.blocks), self._kvp), 0 if alone else self._spare
        return all(
            promises[rank] + len(ids[rank]) + spare <= allocator.available
            for rank, allocator in enumerate(self.allocators)
        )

    def may_fit(self, needed: Items[int], placement: Placement) -> bool:
        """Return False only if there is certainly no room for a request.

        Args:
            needed: number of blocks that the whole prompt needs on each rank, including cached ones.
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
        others: Items[Block | Slot],
        hash_at: Callable[[int], bytes],
        *,
        in_pool: bool = False,
    ) -> int | None:
        """Return the last place from `first` to `stop` whose block is not cached. None if all blocks are cached.

        Args:
            others: the prompt's blocks of the layers without a limit.
            in_pool: whether swapped blocks count as not cached.
        """
        for place in range(stop - 1, first - 1, -1):
            rank, content_hash = others[place].owner, hash_at(place)
            if content_hash not in self.allocators[rank].index and (
                in_pool or content_hash not in self.swaps[rank].index
            ):
                return place
        return None

    def is_found(self, rank: int, content_hash: bytes) -> bool:
        """Return whether a block of a rank has this content, or a slot."""
        return content_hash in self.allocators[rank].index or content_hash in self.swaps[rank].index

    def cached(self, first: int, others: Items[Block | Slot], hash_at: Callable[[int], bytes]) -> WindowPrefix:
        """Return the blocks of a prompt from the place `first` on. All of them must be cached.

        Args:
            others: see `last_missing`.
        """
        blocks = list[Block | Slot]()
        for place in range(first, len(others)):
            rank, content_hash = others[place].owner, hash_at(place)
            block = self.allocators[rank].index.get(content_hash)
            blocks.append(self.swaps[rank].index[content_hash] if block is None else block)
        return WindowPrefix(first, tuple(blocks))

    def hold(self, owners: Items[int], hashes: Items[bytes]) -> HeldWindow | None:
        """Hold what a request needs that goes on behind a prompt's full blocks or at their last token: what is cached,
        and new blocks. None if these are not free. owners: those of all blocks."""
        first = self.first_place(max((len(hashes) - 1) * self._block_tokens, 0))
        found = [self._in_pool(owners[place], hashes[place]) for place in range(first, len(hashes))]
        new = [place for place, block in enumerate(found, first) if block is None]
        cached = [block for block in found if block is not None]
        ids, counts = by_rank(cached, self._kvp), Counter(owners[place] for place in new)
        if any(counts[rank] + len(ids[rank]) > allocator.available for rank, allocator in enumerate(self.allocators)):
            return None
        self.share(cached)
        blocks = tuple(
            Block(owners[place], self.allocators[owners[place]].take()) if block is None else block
            for place, block in enumerate(found, first)
        )
        written = {blocks[place - first] for place in new}
        for swaps in self.swaps:
            swaps.lose(written)
        return HeldWindow(first, blocks, frozenset(new))

    def _in_pool(self, rank: int, content_hash: bytes) -> Block | None:
        """The block of a rank that has this content by now."""
        block = self.allocators[rank].index.get(content_hash)
        return None if block in self.swaps[rank].awaited else block

    def publish(self, held: HeldWindow, hashes: Items[bytes]) -> None:
        """All blocks have their KV: let them be found."""
        for place in held.new:
            self._name(held.blocks[place - held.first], hashes[place])

    def has(self, blocks: Items[Block | Slot], hashes: Items[bytes]) -> bool:
        """Whether all that `hold` would hold is cached; then it is the last to be evicted. blocks: those of the layers
        without a limit."""
        first = self.first_place(max((len(hashes) - 1) * self._block_tokens, 0))
        if self.last_missing(first, len(hashes), blocks, hashes.__getitem__, in_pool=True) is not None:
            return False
        found = self.cached(first, blocks, hashes.__getitem__)
        for allocator, ids in zip(self.allocators, by_rank(kept(found.blocks), self._kvp), strict=True):
            allocator.refresh(ids)
        return True

    def begin(self, promises: list[int], prefix: WindowPrefix, full: int, placement: Placement) -> WindowBlocks:
        """A request holds the blocks of its prefix from now on that are full, those before the place `full`, and is
        promised others, of which it gets those that are swapped in."""
        blocks = prefix.full_blocks(full)
        self.share(kept(blocks))
        for allocator, count in zip(self.allocators, promises, strict=True):
            allocator.reserve(count)
        num_apart = 0 if placement.even else full
        held = WindowBlocks(
            most=self.most_at_once(placement),
            promised=promises,
            first=min(prefix.first, full),
            num_apart=num_apart,
        )
        swapped_in: list[tuple[Slot, Block]] = []
        for block in blocks:
            if isinstance(block, Block):
                held.blocks.append(block)
            else:
                swapped_in.append((block, self.take(held, block.owner)))
        self._swap_in(swapped_in)
        return held

    def _swap_in(self, swapped_in: Items[tuple[Slot, Block]]) -> None:
        """Fill blocks with the content of slots, with the next step. They can be found from now on."""
        for rank, swaps in enumerate(self.swaps):
            pairs = [(slot, target) for slot, target in swapped_in if slot.owner == rank]
            for slot, target in pairs:
                self._name(target, swaps.hash_of(slot))
            swaps.swap_in([slot for slot, _ in pairs], [target for _, target in pairs])

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

    def cut(self, held: WindowBlocks) -> None:
        """Take back the last block of a request, and promise it again where the request may need it."""
        block = held.blocks.pop()
        allocator = self.allocators[block.owner]
        allocator.release(array("q", [block.id]), 0)
        counted = islice(held.blocks, max(held.num_apart - held.first, 0), None)
        if held.promised[block.owner] + sum(each.owner == block.owner for each in counted) < held.most:
            allocator.reserve(1)
            held.promised[block.owner] += 1

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

    def pass_by(self, held: WindowBlocks, length: int, coming: Callable[[int], int]) -> None:
        """Free the blocks that rows after the first `length` tokens do not see, and renew the request's promises.

        One more block stays, so that another request can begin one block before the end of this one.

        Args:
            length: number of tokens of the request that are known.
            coming: returns how many more blocks of a rank the request may get.
        """
        blocks, passed = held.blocks, self._leave_behind(held, length)
        if not passed:
            return
        left = Counter(block.owner for block in passed)
        have = Counter(block.owner for block in islice(blocks, max(held.num_apart - held.first, 0), None))
        for rank, allocator in enumerate(self.allocators):
            promised = held.promised[rank]
            # Of a rank that it has nothing of by now, it may need something again, or never.
            wanted = held.most if have[rank] else promised + left[rank]
            more = max(min(wanted, held.most - have[rank], coming(rank)), 0) - promised
            more = min(more, allocator.available)
            allocator.reserve(max(more, 0))
            allocator.unreserve(max(-more, 0))
            held.promised[rank] += more

    def _leave_behind(self, held: WindowBlocks, length: int) -> list[Block]:
        """Take back the blocks that no row sees any longer which comes after `length` known tokens, but for one."""
        first = self.first_place(max(length - self._block_tokens, 0))
        passed = list[Block]()
        while held.first < first and held.blocks:
            passed.append(held.blocks.popleft())
            held.first += 1
        if passed:
            self.unshare(passed, passed=True)
        return passed

    def release(self, held: WindowBlocks, length: int) -> None:
        """Take back all that a request with `length` known tokens has and was promised."""
        self._leave_behind(held, length)
        self.unshare(held.blocks)
        for allocator, count in zip(self.allocators, held.promised, strict=True):
            allocator.unreserve(count)

    def name(self, held: WindowBlocks, start: int, hashes: Items[bytes]) -> None:
        """Let a request's full blocks be found by their hashes, from the place `start` on, where it still has them."""
        for place in range(max(held.first, start), start + len(hashes)):
            self._name(held.blocks[place - held.first], hashes[place - start])

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

    def unshare(self, blocks: Iterable[Block], *, passed: bool = False) -> None:
        """Take a holder from blocks. passed: see `BlockAllocator.release`."""
        for allocator, ids in zip(self.allocators, by_rank(blocks, self._kvp), strict=True):
            allocator.release(ids, sum(map(allocator.is_shared, ids)), passed=passed)

    def forget(self) -> None:
        """Let all cached blocks be free."""
        for allocator in self.allocators:
            allocator.forget()


class _Touched(NamedTuple):
    """Passes on which contents may be found from now on, or no longer."""

    touch: Callable[[bytes], None]

    def stored(self, tier: Tier, hashes: Iterable[bytes]) -> None:
        for content_hash in hashes:
            self.touch(content_hash)

    def removed(self, tier: Tier, content_hash: bytes) -> None:
        self.touch(content_hash)


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
