"""The KV blocks of all KVP ranks: sequences take them, share them and release them."""

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as Items
from functools import partial
from itertools import repeat

from longhelix.scheduler.cache_record import CacheChanges, CacheRecord
from longhelix.scheduler.config import SchedulerConfig
from longhelix.scheduler.growth import choose_ranks
from longhelix.scheduler.kv.blocks import IDS_PER_BLOCK, Block, BlockAllocator, Slot, by_rank, kept, set_hashes
from longhelix.scheduler.kv.placement import Placement
from longhelix.scheduler.kv.windows import PinnedWindow, WindowGroup, as_sent, with_expired
from longhelix.scheduler.matches import Matches
from longhelix.scheduler.prefix import Prefix
from longhelix.scheduler.sequence import Sequence
from longhelix.scheduler.step import Swap, Turn
from longhelix.scheduler.swaps import Swaps

_UNKNOWN = Block(0, 0)


class BlockPool:
    """The KV blocks of all KVP ranks in all KV groups.

    There is one allocator per KVP rank for the layers whose rows see everything. They share an index of cached blocks.
    `windows` holds the groups of the other layers.

    Args:
        swap_pays: Whether swapping a block pays, by the position of its first token.
        record: Records which blocks are findable, if not None.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        swap_pays: Callable[[int], bool] = lambda start: True,
        record: CacheRecord | None = None,
    ) -> None:
        self.record = record
        self.block_tokens = config.block_tokens
        self._most_listed = IDS_PER_BLOCK * config.num_blocks
        self._names = config.cache.prefix_cache
        self._chooses = not config.placement.batch_invariant and not config.steps.own_clocks
        self._spare = config.num_blocks // 100  # that admission leaves to running requests, which grow
        self._listed = [0] * config.kvp  # block ids that sequences may list, shared ones each time
        self._borrowed: list[tuple[Block, ...]] = []
        self.index: dict[bytes, Block] = {}
        self.swaps = Swaps(
            kvp=config.kvp, num_slots=config.cache.swap_blocks, pool_index=self.index, pays=swap_pays, record=record
        )
        evicted = self.swaps.evicted if config.cache.swap_blocks else None
        self.allocators = [
            BlockAllocator(config.num_blocks, rank, self.index, evicted=evicted, record=record)
            for rank in range(config.kvp)
        ]
        self.matches = Matches(self.allocators, self.index, self.swaps.index)
        touch = None if record is None else record.touch
        self.windows = tuple(
            WindowGroup(
                window,
                config.kvp,
                config.block_tokens,
                spare=config.most_chunk_blocks,
                group=group,
                is_reachable=lambda content_hash: content_hash in self.index or content_hash in self.swaps.index,
                touch=touch,
            )
            for group, window in enumerate(config.cache.windows, start=1)
        )
        self.swaps.watcher = self.matches
        for allocator in self.allocators:
            allocator.watcher = self.matches

    @property
    def available(self) -> int:
        """Number of blocks of all ranks that are neither held nor reserved."""
        return sum(allocator.available for allocator in self.allocators)

    def in_order(self, last: int | None, owners: Collection[int]) -> tuple[int, ...]:
        """Return the KVP ranks in the order in which a request takes them.

        Ranks with more available blocks come first, except for ranks that already have blocks of the request.

        Args:
            last: The rank of the request's last block, which comes first. None if it has no blocks.
            owners: The ranks that have blocks of the request. They come last, except for `last`.
        """
        allocators = self.allocators
        ranks = range(len(allocators))
        return tuple(sorted(ranks, key=lambda rank: (rank != last, rank in owners, -allocators[rank].available, rank)))

    def unheld(self, blocks: Iterable[Block]) -> Counter[int]:
        """Return how many of these blocks have no holder, by rank."""
        ids = by_rank(blocks, len(self.allocators))
        return Counter({rank: allocator.num_cached_of(ids[rank]) for rank, allocator in enumerate(self.allocators)})

    def cached(self, hashes: Iterable[bytes]) -> list[Block]:
        """Return the cached blocks of a prompt, up to the first hash that is not cached."""
        blocks, find, awaited = list[Block](), self.index.get, self.swaps.awaited
        for content_hash in hashes:
            block = find(content_hash)
            if block is None or block in awaited:
                break
            blocks.append(block)
        return blocks

    def has_cached(self, hashes: Items[bytes]) -> bool:
        """Return whether all blocks of a prompt are cached, in all groups. If so, they are evicted last from now on."""
        blocks = self.cached(hashes)
        if len(blocks) < len(hashes) or not all(window.has(blocks, hashes) for window in self.windows):
            return False
        for allocator, ids in zip(self.allocators, by_rank(blocks, len(self.allocators)), strict=True):
            allocator.refresh(ids)
        return True

    def pin_windows(self, owners: Items[int], hashes: Items[bytes]) -> tuple[PinnedWindow, ...] | None:
        """Pin the blocks of a prompt in the groups with a limit (`WindowGroup.pin`). None if too few are free."""
        windows = list[PinnedWindow]()
        for group in self.windows:
            window = group.pin(owners, hashes)
            if window is None:
                for pinned_group, pinned_window in zip(self.windows, windows, strict=False):
                    pinned_group.unshare(pinned_window.blocks)
                return None
            windows.append(window)
        return tuple(windows)

    def fits(self, room: list[int], reservations: list[int], revived: Mapping[int, int], *, alone: bool) -> bool:
        """Return whether a sequence can begin now.

        Args:
            room: The most blocks that it may ever have, by rank.
            reservations: Blocks to reserve for it, by rank.
            revived: Cached blocks without a holder that it shares, by rank. They are no longer available then.
            alone: Whether no other sequence runs that might need blocks to grow.
        """
        listed = (count + most for count, most in zip(self._listed, room, strict=True))
        if max(listed) > self._most_listed:
            return False
        spare = 0 if alone else self._spare
        return all(
            count + revived[rank] + spare <= self.allocators[rank].available for rank, count in enumerate(reservations)
        )

    def fits_windows(self, new: Items[int], prefix: Prefix, placement: Placement, *, alone: bool) -> bool:
        """Return whether there is room for a sequence in the groups with a limit.

        new: the blocks of each rank that are reserved for it in the group without a limit.
        """
        full = prefix.num_tokens // self.block_tokens
        return all(
            window.fits(window.blocks_to_reserve(new, of_prefix, full, placement), of_prefix, alone=alone)
            for window, of_prefix in zip(self.windows, prefix.of_windows(len(self.windows)), strict=True)
        )

    def begin_windows(self, seq: Sequence, new: Items[int], prefix: Prefix) -> None:
        """Give a sequence its prefix and its reservations in the groups with a limit. new: see `fits_windows`."""
        full, placement = prefix.num_tokens // self.block_tokens, seq.kv.placement
        seq.kv.windows = tuple(
            window.begin(window.blocks_to_reserve(new, of_prefix, full, placement), of_prefix, full, placement)
            for window, of_prefix in zip(self.windows, prefix.of_windows(len(self.windows)), strict=True)
        )

    def make_room(self, seq: Sequence, room: list[int]) -> bool:
        """Change the most blocks of each rank that a running sequence may have. False if the ranks cannot list them."""
        listed = [count + new - old for count, new, old in zip(self._listed, room, seq.kv.room, strict=True)]
        if max(listed) > self._most_listed:
            return False
        self._listed, seq.kv.room = listed, room
        return True

    def begin(self, seq: Sequence, full_blocks: Items[Block | Slot]) -> tuple[Block, ...]:
        """Give a sequence the full blocks of its prefix, and reserve others for it.

        Swapped blocks are swapped in to reserved ones.
        """
        kv = seq.kv
        shared = kept(full_blocks)
        self.share(shared)
        for rank, allocator in enumerate(self.allocators):
            allocator.reserve(kv.reserved[rank])
            self._listed[rank] += kv.room[rank]
        blocks = shared if len(shared) == len(full_blocks) else self._swapped_in(seq, full_blocks)
        for of_rank, ids in zip(kv.block_ids, by_rank(blocks, len(self.allocators)), strict=True):
            of_rank.extend(ids)
        kv.num_blocks, kv.most_blocks = len(blocks), max(map(len, kv.block_ids))
        kv.last_owner = blocks[-1].owner if blocks else 0
        return blocks

    def _swapped_in(self, seq: Sequence, full_blocks: Items[Block | Slot]) -> tuple[Block, ...]:
        """Swap in the swapped blocks of a prefix, and return all of its full blocks. All are findable."""
        blocks, slots, targets = list[Block](), list[Slot](), list[Block]()
        for index, block in enumerate(full_blocks):
            if isinstance(block, Slot):
                seq.kv.reserved[block.owner] -= 1
                target = Block(block.owner, self.allocators[block.owner].take_reserved())
                self.name([target], [self.swaps.hash_of(block)], index * self.block_tokens)
                slots.append(block)
                targets.append(target)
                block = target
            blocks.append(block)
        self.swaps.swap_in(slots, targets)
        return tuple(blocks)

    def choose_ranks(self, seq: Sequence, num_blocks: int) -> None:
        """Choose the next ranks of a growing sequence (`growth.choose_ranks`).

        If results must be batch-invariant, a sequence takes its ranks in turn. If each rank has its own clock,
        `Instances` chooses them earlier.
        """
        if self._chooses:
            choose_ranks(seq, num_blocks, self.allocators, self.windows)

    def next_owner(self, seq: Sequence) -> int:
        """Return the KVP rank of the sequence's next block."""
        kv = seq.kv
        return kv.placement.next_owner(kv.last_owner, kv.num_blocks)

    def free_expired(self, seq: Sequence) -> None:
        """Free the blocks that no later row of the sequence sees."""
        kv = seq.kv
        for group, window in zip(self.windows, kv.windows, strict=True):
            group.free_expired(window, seq.known_length, lambda rank: kv.room[rank] - len(kv.block_ids[rank]))

    def tokens_within(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many of a prompt's next tokens, at least one, have blocks in all groups with a limit."""
        kv = seq.kv
        if not self.windows:
            return num_tokens
        num = -(-(seq.length + num_tokens) // self.block_tokens) - kv.num_blocks
        shares = kv.placement.shares(kv.last_owner, kv.num_blocks, num) if num > 0 else ()
        for group, window in zip(self.windows, kv.windows, strict=True):
            room = group.room(window)
            for rank, count, places in shares:
                if count > room[rank]:
                    num = min(num, places.start + room[rank] * (places.step or 1))
                room[rank] = max(room[rank] - count, 0)
        return min(num_tokens, (kv.num_blocks + max(num, 0)) * self.block_tokens - seq.length)

    def take(self, seq: Sequence) -> tuple[Block, ...] | None:
        """Take the sequence's next KV block in each group. None if a group has no block for it."""
        kv = seq.kv
        owner = self.next_owner(seq)
        allocator = self.allocators[owner]
        if self.windows:
            self.free_expired(seq)
            if not all(map(WindowGroup.has_room, self.windows, kv.windows, repeat(owner))):
                return None
        if kv.reserved[owner]:
            kv.reserved[owner] -= 1
            block_id = allocator.take_reserved()
        elif allocator.available > 0:
            block_id = allocator.take()
        else:
            return None
        kv.last_owner = owner
        block_ids = kv.block_ids[owner]
        block_ids.append(block_id)
        kv.num_blocks += 1
        if len(block_ids) > kv.most_blocks:
            kv.most_blocks = len(block_ids)
        block = Block(owner, block_id)
        if self._names:
            seq.unhashed.blocks.append(block)
        return block, *map(WindowGroup.take, self.windows, kv.windows, repeat(owner))

    def take_free(self, seq: Sequence, length: int, spare: int) -> tuple[Block, ...]:
        """Take blocks for `length` tokens of a sequence, but leave `spare` free blocks on each rank.

        Returns the blocks as steps have them.
        """
        taken = list[Block]()
        while seq.kv.num_blocks * self.block_tokens < length:
            self.choose_ranks(seq, seq.kv.num_blocks + 1)
            owner = self.next_owner(seq)
            blocks = self.take(seq) if seq.kv.reserved[owner] or self.allocators[owner].available > spare else None
            if blocks is None:
                break
            taken += blocks
        return tuple(taken)

    def cut(self, seq: Sequence, *, reserve_again: bool) -> None:
        """Take back the blocks behind a sequence's tokens, which were for draft tokens.

        reserve_again: whether to reserve the blocks for the sequence again.
        """
        kv = seq.kv
        while kv.num_blocks > -(-seq.length // self.block_tokens):
            owner = kv.last_owner
            block_id = kv.block_ids[owner].pop()
            self.allocators[owner].release(array("q", [block_id]), 0)
            if reserve_again:
                self.allocators[owner].reserve(1)
                kv.reserved[owner] += 1
            if self._names:
                seq.unhashed.blocks.pop()
            for group, window in zip(self.windows, kv.windows, strict=True):
                group.cut(window)
            kv.num_blocks -= 1
            kv.last_owner = kv.placement.owner((kv.num_blocks - 1) * self.block_tokens)
            kv.most_blocks = max(map(len, kv.block_ids))

    def take_needed(self, seq: Sequence) -> tuple[Block, ...]:
        """Take all blocks that the sequence needs at its length and does not have yet. There may be many."""
        kv = seq.kv
        num = -(-seq.length // self.block_tokens) - kv.num_blocks
        if num < 1:
            return ()
        blocks = [_UNKNOWN] * num
        for rank, count, places in kv.placement.shares(kv.last_owner, kv.num_blocks, num):
            reserved = min(count, kv.reserved[rank])
            kv.reserved[rank] -= reserved
            ids = self.allocators[rank].take_many(count, reserved)
            block_ids = kv.block_ids[rank]
            block_ids.extend(ids)
            if len(block_ids) > kv.most_blocks:
                kv.most_blocks = len(block_ids)
            blocks[places] = map(Block, repeat(rank), ids)
        kv.last_owner = blocks[-1].owner
        kv.num_blocks += num
        if self._names:
            seq.unhashed.blocks.extend(blocks)
        for group, window in zip(self.windows, kv.windows, strict=True):
            for block in blocks:
                group.take(window, block.owner)
        return tuple(blocks)

    def as_sent(self, seq: Sequence, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        """Return the last blocks of a sequence as a `Step` has them."""
        windows = (tuple(window.blocks)[-len(blocks) :] if blocks else () for window in seq.kv.windows)
        return as_sent(blocks, [with_expired(blocks, window) for window in windows])

    def release(self, seq: Sequence) -> None:
        """Take back all blocks and reservations of a sequence."""
        kv = seq.kv
        for rank, allocator in enumerate(self.allocators):
            self._listed[rank] -= kv.room[rank]
            allocator.release(kv.block_ids[rank], kv.reserved[rank])
        for group, window in zip(self.windows, kv.windows, strict=True):
            group.release(window, seq.known_length)
        seq.unhashed.blocks.clear()

    def name_of(self, seq: Sequence, blocks: Items[Block], hashes: Items[bytes], start: int) -> None:
        """Make consecutive blocks of a sequence findable, in all groups. start: see `name`."""
        self.name(blocks, hashes, start)
        for group, window in zip(self.windows, seq.kv.windows, strict=True):
            group.name(window, start // self.block_tokens, hashes)

    def name(self, blocks: Items[Block], hashes: Items[bytes], start: int) -> None:
        """Make consecutive blocks findable by their hashes. start: the position of their first token."""
        if self.record is not None:
            self.record.stored("pool", [content_hash for content_hash in hashes if content_hash not in self.index])
        set_hashes(self.allocators, blocks, hashes)
        if self.swaps.num_slots:
            for index, content_hash in enumerate(hashes):
                self.swaps.name(content_hash, start + index * self.block_tokens)

    def share(self, blocks: Iterable[Block]) -> None:
        """Add a holder to blocks that have one or are cached. The holder must call `unshare`."""
        for allocator, ids in zip(self.allocators, by_rank(blocks, len(self.allocators)), strict=True):
            allocator.share(ids)

    def unshare(self, blocks: Items[Block]) -> None:
        """Remove a holder from blocks. `blocks` has each block once, in position order."""
        for allocator, ids in zip(self.allocators, by_rank(blocks, len(self.allocators)), strict=True):
            allocator.release(ids, 0)

    def borrow(self, blocks: tuple[Block, ...]) -> None:
        """Hold a block of all groups, which the next step copies, until that step is made."""
        self._share_each(blocks)
        self._borrowed.append(blocks)

    def give_back_unused(self, blocks: tuple[Block, ...]) -> None:
        """Release a borrowed block that will not be copied."""
        self._borrowed.remove(blocks)
        self._unshare_each(blocks)

    def _unshare_each(self, blocks: tuple[Block, ...]) -> None:
        self.unshare(blocks[:1])
        for window, block in zip(self.windows, blocks[1:], strict=True):
            window.unshare([block])

    def _share_each(self, blocks: tuple[Block, ...]) -> None:
        self.share(blocks[:1])
        for window, block in zip(self.windows, blocks[1:], strict=True):
            window.share([block])

    def swaps_of_step(self, turn: Turn) -> tuple[tuple[Swap, ...], tuple[Swap, ...]]:
        """Return what the turn's step swaps out and in, in all groups. Group 0 decides before the others."""
        out, back = self.swaps.of_step(turn)
        for window in self.windows:
            for swaps in window.swaps:
                window_out, window_back = swaps.of_step(turn)
                out, back = out + window_out, back + window_back
        return out, back

    def give_back(self, turn: Turn) -> None:
        """Release the borrowed blocks of the ranks that take the turn's step."""
        borrowed, self._borrowed = self._borrowed, []
        for blocks in borrowed:  # one may have been borrowed more than once
            if turn.has((blocks[0].owner,)):
                self._unshare_each(blocks)
            else:
                self._borrowed.append(blocks)

    def changes(self) -> CacheChanges:
        """Return what has become findable, or is findable no longer, since the last call. Needs a record."""
        assert self.record is not None
        index, swapped = self.index, self.swaps.index
        leaving = {content_hash for _, content_hash in self.swaps.evicted}
        return self.record.take(
            lambda content_hash: content_hash in index or content_hash in swapped,
            leaving,
            [partial(self._is_found_in, window) for window in self.windows],
        )

    def _is_found_in(self, window: WindowGroup, content_hash: bytes) -> bool:
        """Return whether a request that begins with the block of this content finds it in a group with a limit."""
        block = self.index.get(content_hash) or self.swaps.index.get(content_hash)
        return block is not None and window.is_found(block.owner, content_hash)

    def forget(self) -> None:
        """Free all cached blocks."""
        for allocator in self.allocators:
            allocator.forget()
        for window in self.windows:
            window.forget()
