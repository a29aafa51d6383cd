"""Cached prefixes of waiting requests, kept up to date block by block, so that no step looks through a whole prompt."""

from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from longhelix.scheduler.chain import Chain
from longhelix.scheduler.kv.blocks import Block, BlockAllocator, Slot


class RunCounts(NamedTuple):
    """How many blocks a run has, by KVP rank.

    Attributes:
        owned: All blocks.
        swapped: Of these, the swapped ones.
        unheld: Of these, the ones in the pool that no sequence holds.
    """

    owned: list[int]
    swapped: list[int]
    unheld: list[int]


@dataclass(eq=False, slots=True)
class Run:
    """Consecutive cached blocks of at least one waiting prompt, without a branch.

    Runs form a tree. The prefix of a waiting request is all runs from the root to the one where its match ends.

    Attributes:
        before: The run before it. None: it is the root.
        start: The number of blocks before it.
        counts: How many blocks it has.
        blocks: Its blocks, in position order.
        hashes: The content hash of each of them.
        after: The runs that follow it, by the hash of their first block.
        matches: The matches that end with it.
    """

    before: "Run | None"
    start: int
    counts: RunCounts
    blocks: list[Block | Slot] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    after: "dict[bytes, Run]" = field(default_factory=dict)
    matches: "set[Match]" = field(default_factory=set)

    @property
    def stop(self) -> int:
        return self.start + len(self.blocks)


@dataclass(eq=False, slots=True)
class Match:
    """How far a waiting request's prompt is cached: up to the end of a run."""

    run: Run

    @property
    def num_blocks(self) -> int:
        return self.run.stop

    @property
    def last(self) -> Block | Slot:
        return self.run.blocks[-1]

    @property
    def owner_before_last(self) -> int | None:
        """The KVP rank of the block before the last one. None if there is none."""
        run, before = self.run, self.run.before
        if len(run.blocks) > 1:
            return run.blocks[-2].owner
        return before.blocks[-1].owner if before is not None and before.blocks else None

    @property
    def num_held(self) -> int:
        """Number of its blocks that sequences hold."""
        run: Run | None = self.run
        count = 0
        while run is not None:
            count += len(run.blocks) - sum(run.counts.swapped) - sum(run.counts.unheld)
            run = run.before
        return count

    def counts(self) -> tuple[Counter[int], Counter[int], Counter[int]]:
        """Return three counts of blocks by KVP rank: all, those in the pool, and those in the pool without a holder."""
        owners, kept, unheld = Counter[int](), Counter[int](), Counter[int]()
        run: Run | None = self.run
        while run is not None:
            for rank, (count, num_swapped, num_unheld) in enumerate(zip(*run.counts, strict=True)):
                if count:
                    owners[rank] += count
                    kept[rank] += count - num_swapped
                    unheld[rank] += num_unheld
            run = run.before
        return owners, kept, unheld


class Matches:
    """The tree of all matches. Allocators and swaps report each block that is taken, released or evicted.

    The cost of a change depends only on the number of changed blocks, not on the number or length of prompts.
    `num_visits` counts the visited blocks, for tests.

    Args:
        allocators: The allocators of all KVP ranks.
        index: Blocks in the pools by hash.
        swapped: Slots by hash.
    """

    def __init__(
        self, allocators: Items[BlockAllocator], index: Mapping[bytes, Block], swapped: Mapping[bytes, Slot]
    ) -> None:
        self._allocators = allocators
        self._index = index
        self._swapped = swapped
        self._root = self._new_run(None, 0)
        self._run_of_block: list[dict[int, Run]] = [{} for _ in allocators]  # by rank and id
        self._run_of_slot: list[dict[int, Run]] = [{} for _ in allocators]
        self.num_visits = 0

    def new(self) -> Match:
        """Return a new match without blocks."""
        match = Match(self._root)
        self._root.matches.add(match)
        return match

    def has(self, first_hash: bytes) -> bool:
        """Return whether a run begins with the block of this hash."""
        return first_hash in self._root.after

    def drop(self, match: Match) -> None:
        """Forget a match."""
        match.run.matches.discard(match)
        self._prune(match.run)

    def extend(self, match: Match, most_blocks: int, chain: Chain) -> None:
        """Extend a match as far as its prompt is cached, to at most `most_blocks`."""
        run = match.run
        while run.stop < most_blocks:
            following = run.after.get(chain[run.stop])
            if following is None:
                cached = self._find(run.stop, most_blocks, chain)
                if cached:
                    run = self._append(run, match, *cached)
                break
            same = chain.num_same(following.start, most_blocks, following.hashes)
            self.num_visits += same
            run = following if same == len(following.blocks) else self._split(following, same)
        self._move(match, run)

    def _find(self, start: int, most_blocks: int, chain: Chain) -> tuple[list[Block | Slot], list[bytes]] | None:
        """Return the cached blocks of a prompt from index `start` on, and their hashes."""
        blocks, hashes = list[Block | Slot](), list[bytes]()
        for digest in islice(chain.since(start), most_blocks - start):
            block = self._index.get(digest) or self._swapped.get(digest)
            if block is None:
                break
            blocks.append(block)
            hashes.append(digest)
        return (blocks, hashes) if blocks else None

    def _append(self, run: Run, match: Match, blocks: list[Block | Slot], hashes: list[bytes]) -> Run:
        """Add blocks behind a run. They go to a new run if another match or run ends or begins there."""
        if run is self._root or run.after or run.matches - {match}:
            run.after[hashes[0]] = run = self._new_run(run, run.stop)
        self._fill(run, blocks, hashes)
        return run

    def _new_run(self, before: Run | None, start: int) -> Run:
        kvp = len(self._allocators)
        return Run(before, start, RunCounts(owned=[0] * kvp, swapped=[0] * kvp, unheld=[0] * kvp))

    def _fill(self, run: Run, blocks: Items[Block | Slot], hashes: Items[bytes]) -> None:
        run.blocks += blocks
        run.hashes += hashes
        self._point_to(run, blocks)

    def _point_to(self, run: Run, blocks: Items[Block | Slot]) -> None:
        """Record that these blocks belong to a run."""
        self._count(run, blocks, 1)
        for block in blocks:
            self._runs_of(block)[block.id] = run

    def _count(self, run: Run, blocks: Items[Block | Slot], sign: int) -> None:
        self.num_visits += len(blocks)
        owned, swapped, unheld = run.counts
        for block in blocks:
            owned[block.owner] += sign
            if isinstance(block, Slot):
                swapped[block.owner] += sign
            elif self._allocators[block.owner].is_cached(block.id):
                unheld[block.owner] += sign

    def _runs_of(self, block: Block | Slot) -> dict[int, Run]:
        return (self._run_of_slot if isinstance(block, Slot) else self._run_of_block)[block.owner]

    def _split(self, run: Run, at: int) -> Run:
        """Split a run before its block `at`, and return the first part.

        The shorter part becomes the new run, because each of its blocks has to be visited.
        """
        if 2 * at < len(run.blocks):
            return self._split_front(run, at)
        rest = self._new_run(run, run.start + at)
        blocks, hashes = run.blocks[at:], run.hashes[at:]
        del run.blocks[at:], run.hashes[at:]
        self._count(run, blocks, -1)
        rest.after, run.after = run.after, {hashes[0]: rest}
        for following in rest.after.values():
            following.before = rest
        for match in list(run.matches):
            self._move_to(match, rest)
        self._fill(rest, blocks, hashes)
        return run

    def _split_front(self, run: Run, at: int) -> Run:
        before = run.before
        assert before is not None
        front = before.after[run.hashes[0]] = self._new_run(before, run.start)
        blocks, hashes = run.blocks[:at], run.hashes[:at]
        del run.blocks[:at], run.hashes[:at]
        self._count(run, blocks, -1)
        run.before, run.start, front.after = front, run.start + at, {run.hashes[0]: run}
        self._fill(front, blocks, hashes)
        return front

    def _move(self, match: Match, run: Run) -> None:
        before = match.run
        if run is not before:
            self._move_to(match, run)
            self._prune(before)

    def _move_to(self, match: Match, run: Run) -> None:
        match.run.matches.discard(match)
        match.run = run
        run.matches.add(match)

    def _prune(self, run: Run) -> None:
        """Drop runs that no match needs any longer, and join runs that no longer branch."""
        while run.before is not None and not run.matches:
            if len(run.after) > 1:
                return
            if run.after:
                self._join(run, *run.after.values())
                return
            before = run.before
            del before.after[run.hashes[0]]
            self._forget(run.blocks)
            run = before

    def _join(self, run: Run, following: Run) -> None:
        """Join two runs. No match ends in the first one. The shorter run's blocks move to the longer one."""
        if len(run.blocks) < len(following.blocks):
            self._join_front(run, following)
            return
        self._fill(run, following.blocks, following.hashes)
        run.after = following.after
        for child in run.after.values():
            child.before = run
        for match in list(following.matches):
            self._move_to(match, run)

    def _join_front(self, run: Run, following: Run) -> None:
        assert run.before is not None
        run.before.after[run.hashes[0]] = following
        following.before, following.start = run.before, run.start
        following.blocks[:0], following.hashes[:0] = run.blocks, run.hashes
        self._point_to(following, run.blocks)

    def _forget(self, blocks: Items[Block | Slot]) -> None:
        self.num_visits += len(blocks)
        for block in blocks:
            del self._runs_of(block)[block.id]

    def on_taken(self, rank: int, ids: Iterable[int]) -> None:
        """See `CacheWatcher`."""
        self._count_unheld(rank, ids, -1)

    def on_released(self, rank: int, ids: Iterable[int]) -> None:
        """See `CacheWatcher`."""
        self._count_unheld(rank, ids, 1)

    def _count_unheld(self, rank: int, ids: Iterable[int], sign: int) -> None:
        runs = self._run_of_block[rank]
        if runs:
            for block_id in ids:
                run = runs.get(block_id)
                if run is not None:
                    run.counts.unheld[rank] += sign

    def on_lost(self, block: Block | Slot) -> None:
        """See `CacheWatcher`."""
        run = self._runs_of(block).get(block.id)
        if run is not None:
            at = len(run.blocks) - 1
            while run.blocks[at] != block:  # mostly the last ones go first
                at -= 1
            self._cut(run, at)

    def _cut(self, run: Run, at: int) -> None:
        """Drop a run from its block `at` on, and all runs behind it."""
        end = run if at else run.before
        assert end is not None
        dropped = list(run.after.values())
        blocks = run.blocks[at:]
        for dropped_run in dropped:
            dropped += dropped_run.after.values()
            blocks += dropped_run.blocks
            for match in list(dropped_run.matches):
                self._move_to(match, end)
        self._count(run, run.blocks[at:], -1)
        self._forget(blocks)
        if not at:
            del end.after[run.hashes[0]]
            for match in list(run.matches):
                self._move_to(match, end)
        del run.blocks[at:], run.hashes[at:]
        run.after.clear()
        self._prune(end)
