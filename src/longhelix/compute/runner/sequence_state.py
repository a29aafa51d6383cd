"""A running sequence, as a rank follows it."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from longhelix.compute.cache.block_arena import BlockArena, Extent
from longhelix.compute.cache.int_table import IntTable
from longhelix.compute.models.image_positions import shift
from longhelix.compute.parallel.pipeline import Travelling
from longhelix.compute.runner.adjustments import Adjustments, Record
from longhelix.compute.runner.local_tokens import first_local
from longhelix.compute.runner.seen_tokens import SeenTokens
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.step import Draft, NewSequence, Rebalance

# The columns of a sequence's line. SHIFT: what is added to its length for the next row's position. From HELD on one for
# each KVP rank, 1 if it is among the holders.
LENGTH, LOCAL_LENGTH, LAST_OWNER, LAST_TOKEN, EXTENT, SHIFT, HELD = range(7)


def sequence_numbers(kvp: int) -> IntTable:
    """The numbers of sequences of `kvp` KVP ranks."""
    return IntTable(HELD + kvp)


@dataclass(frozen=True, eq=False)
class AwaitedTokens:
    """The tokens of a step, on their way from the last pipeline stage, and whose they are."""

    sequences: "Sequence[SequenceState]"
    travelling: Travelling


@dataclass(frozen=True, eq=False)
class Frequencies:
    """By which the rows of a sequence are rotated. Sequences that are rotated alike have the same object.

    Attributes:
        of_rotations: frequencies_R (float64) of each of `ModelSpec.rotations`.
    """

    of_rotations: tuple[Tensor, ...]


class _Number:
    """One of the numbers in a sequence's line."""

    def __init__(self, column: int) -> None:
        self._column = column

    def __get__(self, seq: "SequenceState", kind: type | None = None) -> int:
        return seq.numbers.values.item(seq.line, self._column)

    def __set__(self, seq: "SequenceState", value: int) -> None:
        seq.numbers.values[seq.line, self._column] = value


class SequenceState:
    """This rank's copy of a sequence; steps bring its changes. What changes with every token lies in its `line` of
    `numbers`, where a step changes all sequences at once.

    length: tokens that have KV. local_length: those of them that have it on this rank. last_owner: of the last KV
    block. last_token: that was sampled, on every rank of the last stage and of the first one. seen: which tokens the
    sequence has, in this rank's part of the vocabulary, where a repetition penalty needs them. adjustments: what comes
    before that penalty there, where anything does. instances: see `NewSequence`; more may come.
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
        self.awaited: AwaitedTokens | None = None  # with which the last token comes, while it is on its way
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
        """The KVP ranks that take part: all, or the owners so far."""
        return set(self.numbers.values[self.line, HELD:].nonzero()[0].tolist())

    @property
    def records(self) -> tuple[SeenTokens | Record, ...]:
        """What is kept of its tokens."""
        seen = () if self.seen is None else (self.seen,)
        return seen if self.adjustments is None else (*seen, *self.adjustments.records)

    def begin(self, kvp_rank: int, block_tokens: int) -> None:
        """Take over the cached tokens. Their blocks are full, except perhaps the last one."""
        self._open(self.new.kv.blocks_per_rank[kvp_rank])
        # An instance with a clock of its own has only sequences that it takes part in.
        if self.new.kv.spread or self.instances:
            self.numbers.values[self.line, HELD:] = 1
        blocks = self.new.kv.cached_blocks
        self.add_blocks(blocks, kvp_rank)
        self.length = self.new.kv.cached_tokens
        # Not the number of cached blocks: an instance that joins a running sequence gets only the last one of them.
        self._num_blocks = -(-self.length // block_tokens)
        num_cached = len(blocks) // self._arena.num_groups
        missing = num_cached * block_tokens - self.length if self.last_owner == kvp_rank else 0
        self.local_length = self._arena.num_blocks(self.extent) * block_tokens - missing

    def take_draft(self, draft: Draft, block_tokens: int) -> None:
        """Discard the rejected tokens of the last draft, and note the accepted ones and the token after them."""
        known = token_ids(draft.token_ids)[:1].tolist()
        if self._draft is not None:
            known = token_ids(self._draft.token_ids)[1 : draft.start - self._draft.start].tolist() + known
        for record in self.records:
            for token_id in known:
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
        """Move blocks away from this rank, or to it. They are full, and local order follows position as before."""
        left = [move.place for move in change.moves if move.source.owner == kvp_rank]
        come = [move for move in change.moves if move.target.owner == kvp_rank]
        ids_GJ, places = self._arena.ids(self.extent), self._arena.places(self.extent)
        stays = ~np.isin(places, left)
        ids_GJ, places, new_places = ids_GJ[:, stays], places[stays], [move.place for move in come]
        before = places.searchsorted(new_places)
        # In groups with a limit the places that moved have passed.
        come_GJ = np.zeros((len(ids_GJ), len(come)), np.int64)
        come_GJ[0] = [move.target.id for move in come]
        ids_GJ = np.insert(ids_GJ, before, come_GJ, axis=1)
        places = np.insert(places, before, new_places)
        self._arena.close(self.extent)
        self._open(change.blocks_per_rank[kvp_rank])
        self._arena.append(self.extent, ids_GJ, places)
        self._hold(move.target.owner for move in change.moves)
        self.local_length += (len(come) - len(left)) * block_tokens

    def add_blocks(self, blocks: tuple[Block, ...], kvp_rank: int) -> None:
        """Add blocks, as steps have them: at each place one of each KV group."""
        if blocks:
            self.last_owner = blocks[-1].owner
        groups = self._arena.num_groups
        firsts = blocks[::groups]
        self._hold(block.owner for block in firsts)
        own = [at for at, block in enumerate(firsts) if block.owner == kvp_rank]
        ids_GJ = [[max(blocks[at * groups + group].id, 0) for at in own] for group in range(groups)]
        self._arena.append(self.extent, ids_GJ, [self._num_blocks + at for at in own])
        self._num_blocks += len(firsts)

    def _open(self, room: int) -> None:
        self.extent: Extent = self._arena.open(room)
        self.numbers.values[self.line, EXTENT] = self.extent.line

    def _hold(self, owners: Iterable[int]) -> None:
        for owner in set(owners):
            self.numbers.values[self.line, HELD + owner] = 1


def by_instances(sequences: Iterable[SequenceState]) -> list[tuple[tuple[int, ...], list[SequenceState]]]:
    """The sequences that several instances take part in, by these; all of them come to the same in the same order."""
    found: defaultdict[tuple[int, ...], list[SequenceState]] = defaultdict(list)
    for seq in sorted(sequences, key=lambda seq: seq.new.id):
        if len(seq.instances) > 1:
            found[seq.instances].append(seq)
    return sorted(found.items())


def token_ids(message: bytes) -> NDArray[np.int64]:
    """Of a message from the scheduler."""
    return np.frombuffer(message, np.int32).astype(np.int64)
