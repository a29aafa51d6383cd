"""The KV blocks of all KVP ranks, as sequences take them, share them and give them back."""

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
from longhelix.scheduler.kv.windows import HeldWindow, WindowGroup, as_sent, passed
from longhelix.scheduler.matches import Matches
from longhelix.scheduler.prefix import Prefix
from longhelix.scheduler.sequence import Sequence
from longhelix.scheduler.step import Swap, Turn
from longhelix.scheduler.swaps import Swaps

_UNKNOWN = Block(0, 0)


class BlockPool:
    """An allocator for each KVP rank, over one index of what is cached, and what is swapped of it. They are for layers
    whose rows see everything; `windows` are the groups of others.

    swap_pays: whether a block whose first token is at that position is worth to be swapped. record: None: nobody
    records what can be found.
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
        self._names = config.prefix_cache
        self._chooses = not config.batch_invariant and not config.own_clocks
        self._spare = config.num_blocks // 100  # which admission leaves to requests that run, to grow into
        self._listed = [0] * config.kvp  # block ids that sequences may come to have, shared ones each time
        self._borrowed: list[tuple[Block, ...]] = []
        self.index: dict[bytes, Block] = {}
        self.swaps = Swaps(
            kvp=config.kvp, num_slots=config.swap_blocks, found=self.index, pays=swap_pays, record=record
        )
        evicted = self.swaps.evicted if config.swap_blocks else None
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
            for group, window in enumerate(config.windows, start=1)
        )
        self.swaps.watcher = self.matches
        for allocator in self.allocators:
            allocator.watcher = self.matches

    @property
    def available(self) -> int:
        """Blocks of all ranks that are neither held nor promised."""
        return sum(allocator.available for allocator in self.allocators)

    def in_order(self, last: int | None, held: Collection[int]) -> tuple[int, ...]:
        """The KVP ranks in the order in which a request takes them: the one with the most blocks that are neither held
        nor promised first. Where `held` have its first blocks, the one that has the `last` of these goes before all,
        the others last.
        """
        allocators = self.allocators
        ranks = range(len(allocators))
        return tuple(sorted(ranks, key=lambda rank: (rank != last, rank in held, -allocators[rank].available, rank)))

    def unheld(self, blocks: Iterable[Block]) -> Counter[int]:
        """How many of these blocks on each rank nobody holds."""
        ids = by_rank(blocks, len(self.allocators))
        return Counter({rank: allocator.num_cached_of(ids[rank]) for rank, allocator in enumerate(self.allocators)})

    def cached(self, hashes: Iterable[bytes]) -> list[Block]:
        """The blocks of a prompt, by their hashes, up to the first one that is not cached."""
        blocks, found, awaited = list[Block](), self.index.get, self.swaps.awaited
        for content_hash in hashes:
            block = found(content_hash)
            if block is None or block in awaited:
                break
            blocks.append(block)
        return blocks

    def has_cached(self, hashes: Items[bytes]) -> bool:
        """Whether all blocks of a prompt are cached, in all groups. If so, they become the last ones to be evicted."""
        blocks = self.cached(hashes)
        if len(blocks) < len(hashes) or not all(window.has(blocks, hashes) for window in self.windows):
            return False
        for allocator, ids in zip(self.allocators, by_rank(blocks, len(self.allocators)), strict=True):
            allocator.refresh(ids)
        return True

    def hold_windows(self, owners: Items[int], hashes: Items[bytes]) -> tuple[HeldWindow, ...] | None:
        """Hold the blocks of a prompt in the groups with a limit, see `WindowGroup.hold`. None: not all are free."""
        held = list[HeldWindow]()
        for window in self.windows:
            found = window.hold(owners, hashes)
            if found is None:
                for other, one in zip(self.windows, held, strict=False):
                    other.unshare(one.blocks)
                return None
            held.append(found)
        return tuple(held)

    def fits(self, room: list[int], promised: list[int], revived: Mapping[int, int], *, alone: bool) -> bool:
        """Whether a sequence can begin now.

        room: most blocks that it may ever have, by rank.
        promised: new blocks that it needs at once, by rank.
        revived: cached blocks that it shares and nobody holds, by rank. They no longer count as available.
        alone: no other sequence runs that might need blocks to grow.
        """
        listed = (count + more for count, more in zip(self._listed, room, strict=True))
        if max(listed) > self._most_listed:
            return False
        spare = 0 if alone else self._spare
        return all(
            count + revived[rank] + spare <= self.allocators[rank].available for rank, count in enumerate(promised)
        )

    def fits_windows(self, new: Items[int], prefix: Prefix, placement: Placement, *, alone: bool) -> bool:
        """Whether there is room for a sequence in the groups with a limit. new: the blocks of each rank that it is
        promised in the group without one."""
        full = prefix.num_tokens // self.block_tokens
        return all(
            window.fits(window.promises(new, of_prefix, full, placement), of_prefix, alone=alone)
            for window, of_prefix in zip(self.windows, prefix.of_windows(len(self.windows)), strict=True)
        )

    def begin_windows(self, seq: Sequence, new: Items[int], prefix: Prefix) -> None:
        """A sequence has a prefix in the groups with a limit from now on, and promises. new: see `fits_windows`."""
        full, placement = prefix.num_tokens // self.block_tokens, seq.kv.placement
        seq.kv.windows = tuple(
            window.begin(window.promises(new, of_prefix, full, placement), of_prefix, full, placement)
            for window, of_prefix in zip(self.windows, prefix.of_windows(len(self.windows)), strict=True)
        )

    def make_room(self, seq: Sequence, room: list[int]) -> bool:
        """Let a sequence that runs come to have other numbers of blocks. False: the ranks cannot list so many."""
        listed = [count + more - less for count, more, less in zip(self._listed, room, seq.kv.room, strict=True)]
        if max(listed) > self._most_listed:
            return False
        self._listed, seq.kv.room = listed, room
        return True

    def begin(self, seq: Sequence, full_blocks: Items[Block | Slot]) -> tuple[Block, ...]:
        """A sequence holds the full blocks of its prefix from now on, and is promised others, of which it gets those
        that are swapped in."""
        kv = seq.kv
        shared = kept(full_blocks)
        self.share(shared)
        for rank, allocator in enumerate(self.allocators):
            allocator.reserve(kv.promised[rank])
            self._listed[rank] += kv.room[rank]
        blocks = shared if len(shared) == len(full_blocks) else self._swapped_in(seq, full_blocks)
        for of_rank, ids in zip(kv.block_ids, by_rank(blocks, len(self.allocators)), strict=True):
            of_rank.extend(ids)
        kv.num_blocks, kv.most_blocks = len(blocks), max(map(len, kv.block_ids))
        kv.last_owner = blocks[-1].owner if blocks else 0
        return blocks

    def _swapped_in(self, seq: Sequence, full_blocks: Items[Block | Slot]) -> tuple[Block, ...]:
        """The full blocks of a prefix, where those that are swapped have become new ones, which can be found."""
        blocks, slots, targets = list[Block](), list[Slot](), list[Block]()
        for index, block in enumerate(full_blocks):
            if isinstance(block, Slot):
                seq.kv.promised[block.owner] -= 1
                target = Block(block.owner, self.allocators[block.owner].take_reserved())
                self.name([target], [self.swaps.hash_of(block)], index * self.block_tokens)
                slots.append(block)
                targets.append(target)
                block = target
            blocks.append(block)
        self.swaps.swap_in(slots, targets)
        return tuple(blocks)

    def choose_ranks(self, seq: Sequence, num_blocks: int) -> None:
        """See `growth.choose_ranks`. Where bits may not depend on the load, a sequence takes its ranks in turn; where
        ranks have clocks of their own, they are chosen before (`Instances`)."""
        if self._chooses:
            choose_ranks(seq, num_blocks, self.allocators, self.windows)

    def next_owner(self, seq: Sequence) -> int:
        """The KVP rank of the sequence's next block."""
        kv = seq.kv
        return kv.placement.next_owner(kv.last_owner, kv.num_blocks)

    def pass_by(self, seq: Sequence) -> None:
        """Take back the blocks that no coming row of the sequence sees."""
        kv = seq.kv
        for window, held in zip(self.windows, kv.windows, strict=True):
            window.pass_by(held, seq.known_length, lambda rank: kv.room[rank] - len(kv.block_ids[rank]))

    def tokens_within(self, seq: Sequence, num_tokens: int) -> int:
        """Of a prompt's next tokens, at least one, those for which there are blocks in all groups with a limit."""
        kv = seq.kv
        if not self.windows:
            return num_tokens
        num = -(-(seq.length + num_tokens) // self.block_tokens) - kv.num_blocks
        shares = kv.placement.shares(kv.last_owner, kv.num_blocks, num) if num > 0 else ()
        for window, held in zip(self.windows, kv.windows, strict=True):
            room = window.room(held)
            for rank, count, places in shares:
                if count > room[rank]:
                    num = min(num, places.start + room[rank] * (places.step or 1))
                room[rank] = max(room[rank] - count, 0)
        return min(num_tokens, (kv.num_blocks + max(num, 0)) * self.block_tokens - seq.length)

    def take(self, seq: Sequence) -> tuple[Block, ...] | None:
        """The sequence's next KV block, in each group. None: there is none for it."""
        kv = seq.kv
        owner = self.next_owner(seq)
        allocator = self.allocators[owner]
        if self.windows:
            self.pass_by(seq)
            if not all(map(WindowGroup.has_room, self.windows, kv.windows, repeat(owner))):
                return None
        if kv.promised[owner]:
            kv.promised[owner] -= 1
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

    def take_free(self, seq: Sequence, length: int, left: int) -> tuple[Block, ...]:
        """Take blocks for a sequence that may come to have `length` tokens, but leave `left` free blocks on each rank.
        Returns them as steps have them."""
        taken = list[Block]()
        while seq.kv.num_blocks * self.block_tokens < length:
            self.choose_ranks(seq, seq.kv.num_blocks + 1)
            owner = self.next_owner(seq)
            blocks = self.take(seq) if seq.kv.promised[owner] or self.allocators[owner].available > left else None
            if blocks is None:
                break
            taken += blocks
        return tuple(taken)

    def cut(self, seq: Sequence, *, is_promised: bool) -> None:
        """Take back the blocks behind a sequence's tokens, which were for draft tokens.

        is_promised: the sequence is promised all blocks that it may need, and so is promised them again.
        """
        kv = seq.kv
        while kv.num_blocks > -(-seq.length // self.block_tokens):
            owner = kv.last_owner
            block_id = kv.block_ids[owner].pop()
            self.allocators[owner].release(array("q", [block_id]), 0)
            if is_promised:
                self.allocators[owner].reserve(1)
                kv.promised[owner] += 1
            if self._names:
                seq.unhashed.blocks.pop()
            for window, held in zip(self.windows, kv.windows, strict=True):
                window.cut(held)
            kv.num_blocks -= 1
            kv.last_owner = kv.placement.owner((kv.num_blocks - 1) * self.block_tokens)
            kv.most_blocks = max(map(len, kv.block_ids))

    def take_needed(self, seq: Sequence) -> tuple[Block, ...]:
        """Those that the sequence needs at its length and does not have yet, which may be many."""
        kv = seq.kv
        num = -(-seq.length // self.block_tokens) - kv.num_blocks
        if num < 1:
            return ()
        blocks, promised = [_UNKNOWN] * num, kv.promised
        for rank, count, places in kv.placement.shares(kv.last_owner, kv.num_blocks, num):
            reserved = min(count, promised[rank])
            promised[rank] -= reserved
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
        for window, held in zip(self.windows, kv.windows, strict=True):
            for block in blocks:
                window.take(held, block.owner)
        return tuple(blocks)

    def as_sent(self, seq: Sequence, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        """The last blocks of a sequence as steps have them, see `Step`."""
        held = (tuple(held.blocks)[-len(blocks) :] if blocks else () for held in seq.kv.windows)
        return as_sent(blocks, [passed(blocks, each) for each in held])

    def release(self, seq: Sequence) -> None:
        """Take back all that a sequence has and was promised."""
        kv = seq.kv
        for rank, allocator in enumerate(self.allocators):
            self._listed[rank] -= kv.room[rank]
            allocator.release(kv.block_ids[rank], kv.promised[rank])
        for window, held in zip(self.windows, kv.windows, strict=True):
            window.release(held, seq.known_length)
        seq.unhashed.blocks.clear()

    def name_of(self, seq: Sequence, blocks: Items[Block], hashes: Items[bytes], start: int) -> None:
        """Let a sequence's blocks that follow each other be found, in all groups. start: see `name`."""
        self.name(blocks, hashes, start)
        for window, held in zip(self.windows, seq.kv.windows, strict=True):
            window.name(held, start // self.block_tokens, hashes)

    def name(self, blocks: Items[Block], hashes: Items[bytes], start: int) -> None:
        """Let blocks that follow each other be found by their hashes. start: the position of their first token."""
        if self.record is not None:
            self.record.stored("pool", [content_hash for content_hash in hashes if content_hash not in self.index])
        set_hashes(self.allocators, blocks, hashes)
        if self.swaps.num_slots:
            for index, content_hash in enumerate(hashes):
                self.swaps.name(content_hash, start + index * self.block_tokens)

    def share(self, blocks: Iterable[Block]) -> None:
        """Add a holder, who calls `unshare`, to blocks that have one or are cached."""
        for allocator, ids in zip(self.allocators, by_rank(blocks, len(self.allocators)), strict=True):
            allocator.share(ids)

    def unshare(self, blocks: Items[Block]) -> None:
        """Take a holder from blocks, each once, in position order."""
        for allocator, ids in zip(self.allocators, by_rank(blocks, len(self.allocators)), strict=True):
            allocator.release(ids, 0)

    def borrow(self, blocks: tuple[Block, ...]) -> None:
        """Keep a block, of all groups, which is copied in the next step, until that is made."""
        self._share_each(blocks)
        self._borrowed.append(blocks)

    def give_back_unused(self, blocks: tuple[Block, ...]) -> None:
        """A block that was borrowed is not copied."""
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
        """What is swapped out and in with the turn's step, in all groups. The first group decides before the others."""
        of_all = [self.swaps, *(swaps for window in self.windows for swaps in window.swaps)]
        out, back = zip(*(swaps.of_step(turn) for swaps in of_all), strict=True)
        return sum(out, ()), sum(back, ())

    def give_back(self, turn: Turn) -> None:
        """What was borrowed of those who take the turn's step."""
        borrowed, self._borrowed = self._borrowed, []
        for blocks in borrowed:  # one may have been borrowed more than once
            if turn.has((blocks[0].owner,)):
                self._unshare_each(blocks)
            else:
                self._borrowed.append(blocks)

    def changes(self) -> CacheChanges:
        """What can be found, or no longer, since the last call. Somebody records it."""
        assert self.record is not None
        index, swapped = self.index, self.swaps.index
        leaving = {content_hash for _, content_hash in self.swaps.evicted}
        return self.record.take(
            lambda content_hash: content_hash in index or content_hash in swapped,
            leaving,
            [partial(self._is_found_in, window) for window in self.windows],
        )

    def _is_found_in(self, window: WindowGroup, content_hash: bytes) -> bool:
        """Whether a request that begins with the block of this content finds it in a group with a limit."""
        block = self.index.get(content_hash) or self.swaps.index.get(content_hash)
        return block is not None and window.is_found(block.owner, content_hash)

    def forget(self) -> None:
        """Let all cached blocks be free."""
        for allocator in self.allocators:
            allocator.forget()
        for window in self.windows:
            window.forget()
