"""One rank's state of a running sequence."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from longhelix.compute.cache.block_arena import BlockArena, Extent
from longhelix.compute.cache.int_table import IntTable
from longhelix.compute.models.image_positions import shift
from longhelix.compute.parallel.pipeline import Transfer
from longhelix.compute.runner.adjustments import Adjustments, Record
from longhelix.compute.runner.local_tokens import first_local
from longhelix.compute.runner.seen_tokens import SeenTokens
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.step import Draft, NewSequence, Rebalance

# Columns of a sequence's line. SHIFT is added to the length to get the position of the next row. The columns from
# HOLDERS on say for each KVP rank whether it is a holder (0 or 1).
LENGTH, LOCAL_LENGTH, LAST_OWNER, LAST_TOKEN, EXTENT, SHIFT, HOLDERS = range(7)


def sequence_numbers(kvp: int) -> IntTable:
    """Return a table for the numbers of sequences, with `kvp` KVP ranks."""
    return IntTable(HOLDERS + kvp)


@dataclass(frozen=True, eq=False)
class AwaitedTokens:
    """Tokens of a step that the last pipeline stage is sending, and the sequences that they belong to."""

    sequences: "Sequence[SequenceState]"
    transfer: Transfer


@dataclass(frozen=True, eq=False)
class Frequencies:
    """Rotation frequencies of a sequence. Sequences with the same frequencies share one object.

    Attributes:
        of_rotations: frequencies_R for each of `ModelSpec.rotations`. float64.
    """

    of_rotations: tuple[Tensor, ...]


class _Number:
    """Descriptor of one number in a sequence's line."""

    def __init__(self, column: int) -> None:
        self._column = column

    def __get__(self, seq: "SequenceState", kind: type | None = None) -> int:
        return seq.numbers.values.item(seq.line, self._column)

    def __set__(self, seq: "SequenceState", value: int) -> None:
        seq.numbers.values[seq.line, self._column] = value


class SequenceState:
    """This rank's copy of a sequence, updated by steps.

    Numbers that change with every token are in `line` of the table `numbers`. A step updates all sequences at once.

    Attributes:
        length: Number of tokens with KV.
        local_length: Number of tokens with KV on this rank.
        last_owner: KVP rank of the last KV block.
        last_token: The last sampled token, on ranks of the first and the last stage.
        seen: Tokens of the sequence in this rank's part of the vocabulary. None: there is no repetition penalty.
        adjustments: Changes to logits before the repetition penalty. None: there are none.
        awaited_tokens: The transfer that brings `last_token`. None: it has arrived.
        instances: As in `NewSequence`. More instances may join.
    """

    length = _Number(LENGTH)
    local_length = _Number(LOCAL_LENGTH)
    last_owner = _Number(LAST_OWNER)
    last_token = _Number(LAST_TOKEN)

    def __init__(
        self,
        new: NewSequence,
        frequencies: Frequencies,
        numbers: IntTable,
        arena: BlockArena,
        seen: SeenTokens | None = None,
        adjustments: Adjustments | None = None,
    ) -> None:
        self.new = new
        self.frequencies = frequencies
        self.seen = seen
        self.adjustments = adjustments
        self.awaited_tokens: AwaitedTokens | None = None
        self.microbatch = 0
        self.instances = new.instances
        self._draft: Draft | None = None  # the last one
        self.numbers = numbers
        self.line = numbers.take()
        self.last_owner, self.last_token = -1, new.known.last_id or 0
        numbers.values[self.line, SHIFT] = shift(new.images)
        self._arena = arena
        self._num_blocks = 0  # on all KVP ranks

    @property
    def holders(self) -> set[int]:
        """The KVP ranks that keep KV of the sequence: all, or the owners of its blocks so far."""
        return set(self.numbers.values[self.line, HOLDERS:].nonzero()[0].tolist())

    @property
    def records(self) -> tuple[SeenTokens | Record, ...]:
        """The records to which every token of the sequence is added."""
        seen = () if self.seen is None else (self.seen,)
        return seen if self.adjustments is None else (*seen, *self.adjustments.records)

    def begin(self, kvp_rank: int, block_tokens: int) -> None:
        """Start with the cached tokens. Their blocks are full, except perhaps the last one."""
        self._open_extent(self.new.kv.blocks_per_rank[kvp_rank])
        # If instances have their own clocks, each keeps KV of all of its sequences.
        if self.new.kv.spread or self.instances:
            self.numbers.values[self.line, HOLDERS:] = 1
        blocks = self.new.kv.cached_blocks
        self.add_blocks(blocks, kvp_rank)
        self.length = self.new.kv.cached_tokens
        # Not the number of cached blocks: an instance that joins a running sequence gets only the last one of them.
        self._num_blocks = -(-self.length // block_tokens)
        num_cached = len(blocks) // self._arena.num_groups
        missing = num_cached * block_tokens - self.length if self.last_owner == kvp_rank else 0
        self.local_length = self._arena.num_blocks(self.extent) * block_tokens - missing

    def take_draft(self, draft: Draft, block_tokens: int) -> None:
        """Discard the rejected tokens of the last draft, and record the accepted ones and the token after them."""
        accepted = token_ids(draft.token_ids)[:1].tolist()
        if self._draft is not None:
            accepted = token_ids(self._draft.token_ids)[1 : draft.start - self._draft.start].tolist() + accepted
        for record in self.records:
            for token_id in accepted:
                record.add_one(token_id)
        self._draft = draft
        self.length = draft.start
        self._num_blocks = -(-draft.start // block_tokens)
        places = self._arena.places(self.extent)
        self.local_length = int(first_local(places, np.array([draft.start]), block_tokens)[0])
        self._arena.cut(self.extent, int(places.searchsorted(self._num_blocks)))

    def end(self) -> None:
        self._arena.close(self.extent)
        self.numbers.give_back(self.line)

    def rebalance(self, change: Rebalance, kvp_rank: int, block_tokens: int) -> None:
        """Move full KV blocks from this rank or to it. Local order still follows position."""
        removed_places = [move.place for move in change.moves if move.source.owner == kvp_rank]
        arriving = [move for move in change.moves if move.target.owner == kvp_rank]
        ids_GJ, places = self._arena.ids(self.extent), self._arena.places(self.extent)
        is_kept = ~np.isin(places, removed_places)
        ids_GJ, places, new_places = ids_GJ[:, is_kept], places[is_kept], [move.place for move in arriving]
        before = places.searchsorted(new_places)
        # In groups with a limit, no row sees the moved places any longer.
        arriving_GJ = np.zeros((len(ids_GJ), len(arriving)), np.int64)
        arriving_GJ[0] = [move.target.id for move in arriving]
        ids_GJ = np.insert(ids_GJ, before, arriving_GJ, axis=1)
        places = np.insert(places, before, new_places)
        self._arena.close(self.extent)
        self._open_extent(change.blocks_per_rank[kvp_rank])
        self._arena.append(self.extent, ids_GJ, places)
        self._add_holders(move.target.owner for move in change.moves)
        self.local_length += (len(arriving) - len(removed_places)) * block_tokens

    def add_blocks(self, blocks: tuple[Block, ...], kvp_rank: int) -> None:
        """Add KV blocks in the order of steps: at each place, one block of each KV group."""
        if blocks:
            self.last_owner = blocks[-1].owner
        groups = self._arena.num_groups
        firsts = blocks[::groups]
        self._add_holders(block.owner for block in firsts)
        local = [at for at, block in enumerate(firsts) if block.owner == kvp_rank]
        ids_GJ = [[max(blocks[at * groups + group].id, 0) for at in local] for group in range(groups)]
        self._arena.append(self.extent, ids_GJ, [self._num_blocks + at for at in local])
        self._num_blocks += len(firsts)

    def _open_extent(self, room: int) -> None:
        self.extent: Extent = self._arena.open(room)
        self.numbers.values[self.line, EXTENT] = self.extent.line

    def _add_holders(self, owners: Iterable[int]) -> None:
        for owner in set(owners):
            self.numbers.values[self.line, HOLDERS + owner] = 1


def by_instances(sequences: Iterable[SequenceState]) -> list[tuple[tuple[int, ...], list[SequenceState]]]:
    """Group the sequences shared by several instances, by these instances. All ranks get the same order."""
    shared: defaultdict[tuple[int, ...], list[SequenceState]] = defaultdict(list)
    for seq in sorted(sequences, key=lambda seq: seq.new.id):
        if len(seq.instances) > 1:
            shared[seq.instances].append(seq)
    return sorted(shared.items())


def token_ids(message: bytes) -> NDArray[np.int64]:
    """Decode token ids of a message from the scheduler."""
    return np.frombuffer(message, np.int32).astype(np.int64)
