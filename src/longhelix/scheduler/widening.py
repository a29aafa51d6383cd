"""Widening: moves KV blocks of running requests from a full KVP rank to ranks with free blocks."""

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

# The most blocks of one sequence that move in a step. Ranks buffer them outside their pools, and wait meanwhile.
_MOST_MOVED = 64


class _MovedBlock(NamedTuple):
    """A findable block that moves.

    Attributes:
        source: The block before the move.
        target: The block after it.
        digest: Its content hash.
        start: The position of its first token.
        content: Its content for the record. None if there is no record.
    """

    source: Block
    target: Block
    digest: bytes
    start: int
    content: BlockContent | None


class Widening:
    """Makes room on a full KVP rank by moving the last blocks of the sequence that has the most blocks there.

    Blocks move until the rank has an average number of free blocks, or enough for a while, or until no more blocks of
    the sequence can move. If there is too little room for that, the next block of the growing sequence goes to another
    rank. A sequence whose blocks have moved is striped.

    Some blocks do not move: the last block, so that ranks continue to write to the same block; shared blocks, which
    would free no room; blocks without a hash; and blocks that rows see in KV groups with a limit. The source of a move
    is free or cached at once, because steps are executed in order, and copy before they compute.
    """

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self._pool = pool
        self._allocators = pool.allocators
        # Moves between instances with their own clocks would make them wait for each other.
        self._widens = config.kvp > 1 and not (config.placement.batch_invariant or config.steps.own_clocks)
        self._most_blocks = config.most_blocks if self._widens else 0
        # Otherwise, ranks that are almost full would exchange a block or two in every step.
        self._least_level = config.num_blocks // 100 + 1
        self._of_step: dict[Sequence, Rebalance] = {}
        self._moved: dict[int, list[_MovedBlock]] = {}  # by sequence

    def widen(self, rank: int, growing: Sequence, sequences: Iterable[Sequence]) -> bool:
        """Make room for a sequence whose next block would go to a full KVP rank.

        Args:
            rank: The full rank.
            growing: The sequence.
            sequences: The decoding sequences, whose blocks may move.

        Returns:
            False if no other rank has room.
        """
        if not self._widens:
            return False
        is_full = not self._allocators[rank].available  # otherwise, the pool of a KV group with a limit is full
        return (is_full and self._relieve(rank, sequences)) or self._go_elsewhere(growing)

    def _relieve(self, rank: int, sequences: Iterable[Sequence]) -> bool:
        """Move blocks away from a rank."""
        level = sum(allocator.available for allocator in self._allocators) // len(self._allocators)
        if level < self._least_level:
            return False
        candidates = [seq for seq in sequences if seq not in self._of_step and not any(seq.kv.reserved)]
        candidates.sort(key=lambda seq: (-len(seq.kv.block_ids[rank]), seq.id))
        return any(self._move(seq, rank, level) for seq in candidates if seq.kv.block_ids[rank])

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
        """Return and forget the changes for the next step."""
        for seq, rebalance in self._of_step.items():
            seq.job.history.moved_tokens += len(rebalance.moves) * seq.kv.placement.block_tokens
        rebalances = tuple(self._of_step.values())
        self._of_step.clear()
        return rebalances

    def name_moved(self) -> None:
        """Make moved blocks findable at their targets. Called after the step that moves them is made."""
        for moved in self._moved.values():
            self._name(moved)
        self._moved.clear()

    def forget(self, seq: Sequence) -> None:
        """Forget a sequence that no longer runs. Moves that are not in a step yet are cancelled."""
        moved = self._moved.pop(seq.id, [])
        if self._of_step.pop(seq, None) is None:
            self._name(moved)

    def _name(self, moved: list[_MovedBlock]) -> None:
        """Make blocks findable at their targets, unless another block with the content is findable or held."""
        sources = defaultdict[int, "array[int]"](lambda: array("q"))
        targets: list[_MovedBlock] = []
        for block in moved:
            known = self._pool.index.get(block.digest)
            if known is None or (known == block.source and self._allocators[known.owner].is_cached(known.id)):
                targets.append(block)
                if known is not None:
                    sources[known.owner].append(known.id)
        for owner, ids in sources.items():
            self._allocators[owner].uncache(ids)
        for block in targets:
            if self._pool.record is not None and block.content is not None:
                self._pool.record.know(block.digest, block.content)  # forgotten if the source was evicted
            self._pool.name([block.target], [block.digest], block.start)

    def _move(self, seq: Sequence, rank: int, level: int) -> bool:
        """Move blocks of a sequence away from a rank. Return False if none can move."""
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
        """Change the owners of a sequence's blocks. Return False if a rank would have too many of them."""
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
        """Return the indices of the blocks on a rank that may move."""
        allocator, num_fixed = self._allocators[rank], max(len(seq.unhashed.blocks), 1)
        stop = min([len(blocks) - num_fixed, *(window.first for window in seq.kv.windows)])
        return [
            index
            for index, block in enumerate(blocks[: max(stop, 0)])
            if block.owner == rank and not allocator.is_shared(block.id)
        ]

    def _targets(self, count: int) -> list[int]:
        """Return the ranks that `count` blocks go to. Each block goes to the rank with the most room then."""
        room, targets = [allocator.available for allocator in self._allocators], []
        for _ in range(count):
            roomiest = room.index(max(room))
            room[roomiest] -= 1
            targets.append(roomiest)
        return sorted(targets)

    def _moves(self, seq: Sequence, blocks: list[Block], indices: Items[int], targets: Items[int]) -> tuple[Move, ...]:
        """Give a sequence its new blocks, and release those that they replace."""
        kv = seq.kv
        new = {rank: iter(self._allocators[rank].take_many(count, 0)) for rank, count in Counter(targets).items()}
        moved = {index: Block(target, next(new[target])) for index, target in zip(indices, targets, strict=True)}
        block_ids, moves, released = [array("q") for _ in kv.block_ids], [], array("q")
        for index, source in enumerate(blocks):
            block = moved.get(index, source)
            if block is not source:
                moves.append(Move(source, block, index))
                released.append(source.id)
            block_ids[block.owner].append(block.id)
        allocator, block_tokens = self._allocators[blocks[indices[0]].owner], kv.placement.block_tokens
        contents = {} if self._pool.record is None else self._pool.record.contents
        self._moved[seq.id] = [
            _MovedBlock(
                source=move.source,
                target=move.target,
                digest=digest,
                start=index * block_tokens,
                content=contents.get(digest),
            )
            for move, index in zip(moves, indices, strict=True)
            if (digest := allocator.hash_of(move.source.id)) is not None
        ]
        allocator.release(released, 0)
        kv.block_ids, kv.most_blocks = block_ids, max(map(len, block_ids))
        return tuple(moves)


def _blocks(seq: Sequence) -> list[Block]:
    """Return a sequence's blocks, in position order."""
    kv = seq.kv
    ids, placement = [iter(of_rank) for of_rank in kv.block_ids], kv.placement
    starts = range(0, kv.num_blocks * placement.block_tokens, placement.block_tokens)
    return [Block(owner, next(ids[owner])) for owner in map(placement.owner, starts)]
