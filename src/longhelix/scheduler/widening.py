"""Widening: blocks of requests that run move from a KVP rank without room to ranks that have some."""

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Items
from itertools import repeat
from typing import NamedTuple

from msgspec import structs

from longhelix.scheduler.block_pool import BlockPool
from longhelix.scheduler.cache_record import BlockContent
from longhelix.scheduler.config import SchedulerConfig
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.kv.placement import Continued, Striped, blocks_needed
from longhelix.scheduler.kv.windows import WindowGroup
from longhelix.scheduler.sequence import Sequence
from longhelix.scheduler.step import Move, Rebalance

# Blocks of one sequence in one step: ranks keep all that moves beside their pools, and stand still meanwhile.
_MOST_MOVED = 64


class _Named(NamedTuple):
    """What a moved block was found by. start: the position of its first token. content: None: nobody records it."""

    source: Block
    target: Block
    digest: bytes
    start: int
    content: BlockContent | None


class Widening:
    """Of the sequence that has the most blocks on a full rank, the last ones move, until that rank has as much room as
    all ranks have on the average, or room enough for a while, or the sequence has none left to give. Where there is too
    little room for that, the next block of the sequence that grows goes elsewhere. From then on the sequence is
    striped.

    Its last block stays, so that ranks go on writing where they are, and so do blocks that others share, which would
    leave no room behind, those that have yet to get their hashes, and those that rows see in KV groups with a limit.
    A block that moves is free, or cached, at once: steps are executed in order, and copy before they compute.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self._pool = pool
        self._allocators = pool.allocators
        # What moved from one clock to another would tie the two.
        self._widens = config.kvp > 1 and not (config.batch_invariant or config.own_clocks)
        self._most_blocks = config.most_blocks if self._widens else 0
        # Ranks that are all but full would give each other a block or two in every step.
        self._least_level = config.num_blocks // 100 + 1
        self._of_step: dict[Sequence, Rebalance] = {}
        self._named: dict[int, list[_Named]] = {}

    def widen(self, rank: int, growing: Sequence, sequences: Iterable[Sequence]) -> bool:
        """Make room for a sequence whose next block would go to a KVP rank that has none, if others have some.
        sequences: those that decode. False: nothing can be done."""
        if not self._widens:
            return False
        is_full = not self._allocators[rank].available  # or else a KV group with a limit is
        return (is_full and self._relieve(rank, sequences)) or self._go_elsewhere(growing)

    def _relieve(self, rank: int, sequences: Iterable[Sequence]) -> bool:
        """Move blocks away from a rank."""
        level = sum(allocator.available for allocator in self._allocators) // len(self._allocators)
        if level < self._least_level:
            return False
        able = [seq for seq in sequences if seq not in self._of_step and not any(seq.kv.reserved)]
        able.sort(key=lambda seq: (-len(seq.kv.block_ids[rank]), seq.id))
        return any(self._move(seq, rank, level) for seq in able if seq.kv.block_ids[rank])

    def _go_elsewhere(self, seq: Sequence) -> bool:
        """Let a sequence's next block go to the rank with the most room."""
        room = [
            allocator.available * all(map(WindowGroup.has_room, self._pool.windows, seq.kv.windows, repeat(rank)))
            for rank, allocator in enumerate(self._allocators)
        ]
        if not any(room):
            return False
        owners = [block.owner for block in _blocks(seq)]
        return self._place(seq, [*owners, room.index(max(room))])

    def of_step(self) -> tuple[Rebalance, ...]:
        """Return what the next step carries, and forget it."""
        for seq, one in self._of_step.items():
            seq.job.history.moved_tokens += len(one.moves) * seq.kv.placement.block_tokens
        rebalances = tuple(self._of_step.values())
        self._of_step.clear()
        return rebalances

    def name(self) -> None:
        """The step is made that moves what was to be moved: let it be found where it is, and no longer where it was."""
        for found in self._named.values():
            self._name(found)
        self._named.clear()

    def forget(self, seq: Sequence) -> None:
        """A sequence runs no longer. What was to move with the step that is being made stays where it was."""
        found = self._named.pop(seq.id, [])
        if self._of_step.pop(seq, None) is None:
            self._name(found)

    def _name(self, found: list[_Named]) -> None:
        left = defaultdict[int, "array[int]"](lambda: array("q"))
        moved: list[_Named] = []
        for block in found:
            there = self._pool.index.get(block.digest)
            if there is None or (there == block.source and self._allocators[there.owner].is_cached(there.id)):
                moved.append(block)
                if there is not None:
                    left[there.owner].append(there.id)
        for owner, ids in left.items():
            self._allocators[owner].uncache(ids)
        for block in moved:
            if self._pool.record is not None and block.content is not None:
                self._pool.record.know(block.digest, block.content)  # it may be forgotten since the source was evicted
            self._pool.name([block.target], [block.digest], block.start)

    def _move(self, seq: Sequence, rank: int, level: int) -> bool:
        """Move blocks of a sequence away from a rank. False: it can give none."""
        blocks = _blocks(seq)
        movable = self._movable(seq, blocks, rank)
        targets = self._targets(min(level, len(movable), _MOST_MOVED))
        indices = movable[len(movable) - len(targets) :]
        owners = [block.owner for block in blocks]
        for index, target in zip(indices, targets, strict=True):
            owners[index] = target
        if not indices or not self._place(seq, owners):
            return False
        moves = self._moves(seq, blocks, indices, targets)
        self._of_step[seq] = structs.replace(self._of_step[seq], moves=moves)
        return True

    def _place(self, seq: Sequence, owners: list[int]) -> bool:
        """Let a sequence's blocks have other owners. False: a rank would have too many of them."""
        kv = seq.kv
        placement = Continued(Striped(kv.placement.kvp, kv.placement.block_tokens), tuple(owners))
        room = blocks_needed(placement, seq.schedule.num_rows)
        if max(room) > self._most_blocks or not self._pool.make_room(seq, room):
            return False
        kv.placement = placement
        before = self._of_step.get(seq)
        self._of_step[seq] = Rebalance(seq.id, () if before is None else before.moves, tuple(room))
        return True

    def _movable(self, seq: Sequence, blocks: list[Block], rank: int) -> list[int]:
        """The indices of its blocks that may move."""
        allocator, stay = self._allocators[rank], max(len(seq.unhashed.blocks), 1)
        stop = min([len(blocks) - stay, *(held.first for held in seq.kv.windows)])
        return [
            index
            for index, block in enumerate(blocks[: max(stop, 0)])
            if block.owner == rank and not allocator.is_shared(block.id)
        ]

    def _targets(self, count: int) -> list[int]:
        """The ranks that so many blocks go to: each to the one with the most room by then."""
        room, targets = [allocator.available for allocator in self._allocators], []
        for _ in range(count):
            roomiest = room.index(max(room))
            room[roomiest] -= 1
            targets.append(roomiest)
        return sorted(targets)

    def _moves(self, seq: Sequence, blocks: list[Block], indices: Items[int], targets: Items[int]) -> tuple[Move, ...]:
        """Give a sequence its new blocks, and take back those that they replace."""
        kv = seq.kv
        new = {rank: iter(self._allocators[rank].take_many(count, 0)) for rank, count in Counter(targets).items()}
        moved = {index: Block(target, next(new[target])) for index, target in zip(indices, targets, strict=True)}
        block_ids, moves, left = [array("q") for _ in kv.block_ids], [], array("q")
        for index, source in enumerate(blocks):
            block = moved.get(index, source)
            if block is not source:
                moves.append(Move(source, block, index))
                left.append(source.id)
            block_ids[block.owner].append(block.id)
        allocator, block_tokens = self._allocators[blocks[indices[0]].owner], kv.placement.block_tokens
        contents = {} if self._pool.record is None else self._pool.record.contents
        self._named[seq.id] = [
            _Named(
                source=move.source,
                target=move.target,
                digest=digest,
                start=index * block_tokens,
                content=contents.get(digest),
            )
            for move, index in zip(moves, indices, strict=True)
            if (digest := allocator.hash_of(move.source.id)) is not None
        ]
        allocator.release(left, 0)
        kv.block_ids, kv.most_blocks = block_ids, max(map(len, block_ids))
        return tuple(moves)


def _blocks(seq: Sequence) -> list[Block]:
    """A sequence's blocks, in position order."""
    kv = seq.kv
    ids, placement = [iter(of_rank) for of_rank in kv.block_ids], kv.placement
    starts = range(0, kv.num_blocks * placement.block_tokens, placement.block_tokens)
    return [Block(owner, next(ids[owner])) for owner in map(placement.owner, starts)]
