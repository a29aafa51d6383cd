"""The KV blocks of all KVP ranks, as sequences take them, share them and give them back."""

from array import array
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items

from longhelix.kv.blocks import IDS_PER_BLOCK, Block, BlockAllocator
from longhelix.scheduler.config import SchedulerConfig
from longhelix.scheduler.sequence import Sequence


class BlockPool:
    """An allocator for each KVP rank, over one index of what is cached."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._block_tokens = config.block_tokens
        self._most_listed = IDS_PER_BLOCK * config.num_blocks
        self._names = config.prefix_cache
        self._spare = config.num_blocks // 100  # which admission leaves to requests that run, to grow into
        self._listed = [0] * config.kvp  # block ids that sequences may come to have, shared ones each time
        self._borrowed: list[Block] = []
        self.index: dict[bytes, Block] = {}
        self.allocators = [BlockAllocator(config.num_blocks, rank, self.index) for rank in range(config.kvp)]

    def roomiest(self) -> int:
        """The KVP rank with the most blocks that are neither held nor promised."""
        return max(range(len(self.allocators)), key=lambda rank: (self.allocators[rank].available, -rank))

    def fits(self, room: list[int], promised: list[int], shared: Iterable[Block], *, alone: bool) -> bool:
        """Whether a sequence can begin now: with `promised` blocks of each rank, and `shared` ones that are there.

        `room` is what it may come to have of each rank. `alone`: no other runs, which might need blocks to grow.
        """
        listed = (count + more for count, more in zip(self._listed, room, strict=True))
        if max(listed) > self._most_listed:
            return False
        revived = Counter(block.owner for block in shared if self.allocators[block.owner].is_cached(block.id))
        spare = 0 if alone else self._spare
        return all(
            count + revived[rank] + spare <= self.allocators[rank].available for rank, count in enumerate(promised)
        )

    def begin(self, seq: Sequence, shared: Items[Block]) -> None:
        """A sequence holds the full blocks `shared` from now on, and is promised others."""
        for block in shared:
            seq.block_ids[block.owner].append(block.id)
        for rank, allocator in enumerate(self.allocators):
            allocator.share(seq.block_ids[rank])
            allocator.reserve(seq.promised[rank])
            self._listed[rank] += seq.room[rank]
        seq.num_blocks, seq.most_blocks = len(shared), max(map(len, seq.block_ids))
        seq.last_owner = shared[-1].owner if shared else 0

    def next_owner(self, seq: Sequence) -> int:
        """The KVP rank of the sequence's next block."""
        return seq.placement.next_owner(seq.last_owner, seq.num_blocks)

    def can_take(self, seq: Sequence) -> bool:
        """Whether there is a block for it."""
        owner = self.next_owner(seq)
        return seq.promised[owner] > 0 or self.allocators[owner].available > 0

    def take(self, seq: Sequence) -> Block:
        """The sequence's next KV block."""
        owner = seq.last_owner = self.next_owner(seq)
        if seq.promised[owner]:
            seq.promised[owner] -= 1
            block_id = self.allocators[owner].take_reserved()
        else:
            block_id = self.allocators[owner].take()
        block_ids = seq.block_ids[owner]
        block_ids.append(block_id)
        seq.num_blocks += 1
        if len(block_ids) > seq.most_blocks:
            seq.most_blocks = len(block_ids)
        block = Block(owner, block_id)
        if self._names:
            seq.unnamed.append(block)
        return block

    def take_needed(self, seq: Sequence) -> tuple[Block, ...]:
        """Those that the sequence needs at its length and does not have yet, which may be many."""
        owners, owner, next_owner = [], seq.last_owner, seq.placement.next_owner
        for index in range(seq.num_blocks, -(-seq.length // self._block_tokens)):
            owner = next_owner(owner, index)
            owners.append(owner)
        ids = {rank: iter(self._take_of(seq, rank, owners.count(rank))) for rank in set(owners)}
        blocks = tuple([Block(owner, next(ids[owner])) for owner in owners])
        seq.last_owner = owner
        seq.num_blocks += len(blocks)
        if self._names:
            seq.unnamed.extend(blocks)
        return blocks

    def _take_of(self, seq: Sequence, rank: int, count: int) -> "array[int]":
        """Ids of the sequence's next blocks on one rank."""
        promised = min(count, seq.promised[rank])
        seq.promised[rank] -= promised
        ids = self.allocators[rank].take_many(count, promised)
        block_ids = seq.block_ids[rank]
        block_ids += ids
        if len(block_ids) > seq.most_blocks:
            seq.most_blocks = len(block_ids)
        return ids

    def release(self, seq: Sequence) -> None:
        """Take back all that a sequence has and was promised."""
        for rank, allocator in enumerate(self.allocators):
            self._listed[rank] -= seq.room[rank]
            allocator.release(seq.block_ids[rank], seq.promised[rank])
        seq.unnamed.clear()

    def name(self, named: Iterable[tuple[Block, bytes]]) -> None:
        """Let blocks be found by their hashes."""
        for block, digest in named:
            self.allocators[block.owner].set_hash(block.id, digest)

    def share(self, blocks: Iterable[Block]) -> None:
        """Add a holder, who calls `unshare`, to blocks that have one or are cached."""
        for block in blocks:
            self.allocators[block.owner].share([block.id])

    def unshare(self, blocks: Items[Block]) -> None:
        """Take a holder from blocks, each once, in position order."""
        for rank, allocator in enumerate(self.allocators):
            allocator.release(array("q", [block.id for block in blocks if block.owner == rank]), 0)

    def borrow(self, block: Block) -> None:
        """Keep a block, which is copied in the next step, until that is made."""
        self.share([block])
        self._borrowed.append(block)

    def give_back(self) -> None:
        """What was borrowed."""
        for block in self._borrowed:  # one may have been borrowed more than once
            self.unshare([block])
        self._borrowed.clear()

    def forget(self) -> None:
        """Let all cached blocks be free."""
        for allocator in self.allocators:
            allocator.forget()
