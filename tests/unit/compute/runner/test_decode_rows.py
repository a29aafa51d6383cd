"""Rows of decodes, made of numbers that are kept from step to step, against rows made of all blocks of sequences."""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from longhelix.compute.cache.block_arena import BlockArena
from longhelix.compute.kernels import native
from longhelix.compute.runner.decode_rows import DecodeRows
from longhelix.compute.runner.row_memory import RowMemory
from longhelix.compute.runner.sequence_state import Frequencies, SequenceState, sequence_numbers
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.request import ImageSpan, SamplingParams
from longhelix.scheduler.step import InitialKV, Move, NewSequence, Rebalance
from longhelix.spec.attention import Visibility

pytestmark = pytest.mark.unit

needs_native = pytest.mark.skipif(native.module is None, reason="the native kernels were not built")

BLOCK_TOKENS, RANKS, ROOM = 4, 3, 12
WINDOW_TOKENS, CHUNK_TOKENS = 10, 7
VIEWS = (Visibility(window_tokens=WINDOW_TOKENS), Visibility(chunk_tokens=CHUNK_TOKENS))


GROUPS = 1 + len(VIEWS)


def ids_of(block):
    """Its ids in the KV groups."""
    return block.id, block.id + 10_000, block.id + 20_000


def sent(blocks):
    """As steps have them."""
    return tuple(Block(block.owner, id) for block in blocks for id in ids_of(block))


@dataclass
class Plain:
    """A sequence as nothing but its blocks in the order of positions."""

    id: int
    blocks: list[Block]
    length: int
    token: int = 0
    held: set[int] = field(default_factory=set)
    shift: int = 0
    moved: set[Block] = field(default_factory=set)

    def row(self, rank):
        """The position, the slot and the limit of the next row."""
        owners = [self.blocks[position // BLOCK_TOKENS].owner for position in range(self.length + 1)]
        block, slots = self.blocks[self.length // BLOCK_TOKENS], [-1] * GROUPS
        if block.owner == rank:
            slots = [id * BLOCK_TOKENS + self.length % BLOCK_TOKENS for id in ids_of(block)]
        return self.length + self.shift, *slots, owners.count(rank)

    def firsts(self, rank):
        """The first local token that the next row sees, by view: how many of those before it lie here."""
        seen = self.length + 1 - WINDOW_TOKENS, self.length // CHUNK_TOKENS * CHUNK_TOKENS
        return [
            sum(self.blocks[position // BLOCK_TOKENS].owner == rank for position in range(max(first, 0)))
            for first in seen
        ]

    def ids(self, rank, group):
        """None: those that have moved, which no row sees in groups with a limit."""
        own = [block for block in self.blocks if block.owner == rank]
        return [None if group and block in self.moved else ids_of(block)[group] for block in own]


class Rank:
    def __init__(self, rank):
        self.rank = rank
        self.arena = BlockArena(8 * ROOM, torch.device("cpu"), num_groups=3)  # so little that extents move
        self.numbers = sequence_numbers(RANKS)
        self.memory = RowMemory(self.numbers, self.arena, rank, BLOCK_TOKENS, pairs=[2], views=VIEWS)
        self.decoding = [DecodeRows(), DecodeRows()]  # of two microbatches
        self.sequences = {}

    def begin(self, new):
        seq = SequenceState(new, Frequencies((torch.zeros(2),)), self.numbers, self.arena)
        seq.begin(self.rank, BLOCK_TOKENS)
        self.sequences[new.id] = seq

    def check(self, microbatch, plain):
        """The rows of a step, and what is kept after it."""
        decoding = self.decoding[microbatch]
        assert list(decoding) == [one.id for one in plain]
        num_held, everywhere = self.memory.advance(decoding)
        held = [one for one in plain if self.rank in one.held]
        assert (num_held, everywhere) == (len(held), all(len(one.held) == RANKS for one in plain))
        rows = self.memory.arrays(len(plain), num_held)
        assert rows.token_ids_B.tolist() == [one.token for one in plain]
        expected = [one.row(self.rank) for one in held]
        found = rows.positions_b, rows.slots_b, *rows.window_slots, rows.limits_b
        assert list(zip(*(some.tolist() for some in found), strict=True)) == expected
        assert rows.row_starts_b.tolist() == list(range(num_held + 1))
        firsts = [[each.firsts(self.rank)[view] for each in held] for view in range(len(VIEWS))]
        assert [firsts_b.tolist() for firsts_b in rows.firsts] == firsts
        for one, (begin, end) in zip(held, rows.extents_b2.tolist(), strict=True):
            for group, blocks_X in enumerate(self.arena.blocks):
                expected_ids = one.ids(self.rank, group)
                found_ids = [
                    None if given is None else id
                    for id, given in zip(blocks_X[begin:end].tolist(), expected_ids, strict=True)
                ]
                assert found_ids == expected_ids
        tensors = self.memory.tensors(len(plain), num_held)
        flat = [(*each[:-2], *each.firsts, *each.window_slots) for each in (rows, tensors.rows)]
        for array, tensor in zip(*flat, strict=True):
            assert np.array_equal(array, tensor)
        (rotation,) = tensors.rotations
        assert rotation.cos_tR.shape == rotation.sin_tR.shape == (num_held, 2)
        for one, (*_, limit) in zip(held, expected, strict=True):
            seq = self.sequences[one.id]
            assert (seq.length, seq.local_length, seq.holders) == (one.length + 1, limit, one.held)


class Schedule:
    """Sequences that begin, join, leave, grow, widen and end as chance has it, on all ranks."""

    def __init__(self, seed):
        self.chance = random.Random(seed)
        self.ranks = [Rank(rank) for rank in range(RANKS)]
        self.plain, self.rows = {}, [[], []]
        self.next_id = 0
        self.counts = dict.fromkeys(("begun", "joined", "left", "ended", "grown", "widened"), 0)

    def new_block(self, owner=None):
        self.next_id += 1
        return Block(self.chance.randrange(RANKS) if owner is None else owner, self.next_id)

    def begin(self):
        id, spread = 1000 + self.counts["begun"], self.chance.random() < 0.5
        length = self.chance.randint(1, 4 * BLOCK_TOKENS)
        blocks = [self.new_block() for _ in range(-(-length // BLOCK_TOKENS))]
        held = set(range(RANKS)) if spread else {block.owner for block in blocks}
        images = (ImageSpan(0, 2, 3, b""),) if self.chance.random() < 0.5 else ()
        self.plain[id] = Plain(id, blocks, length, held=held, shift=-3 if images else 0)
        new = NewSequence(
            id, SamplingParams(), 0, 99, InitialKV((ROOM,) * RANKS, spread, length, sent(blocks)), images=images
        )
        for rank in self.ranks:
            rank.begin(new)
        self.counts["begun"] += 1

    def join(self, id, microbatch):
        self.rows[microbatch].append(self.plain[id])
        for rank in self.ranks:
            rank.decoding[microbatch].join(rank.sequences[id])
        self.counts["joined"] += 1

    def leave(self, id, microbatch):
        self.rows[microbatch].remove(self.plain[id])
        for rank in self.ranks:
            rank.decoding[microbatch].leave(id)
        self.counts["left"] += 1

    def end(self, id):
        del self.plain[id]
        for rank in self.ranks:
            rank.sequences.pop(id).end()
        self.counts["ended"] += 1

    def widen(self, one):
        """Some of its blocks, but not the last one, go to other ranks."""
        before, after = one.blocks, list(one.blocks)
        for index in range(len(before) - 1):
            if self.chance.random() < 0.5:
                after[index] = self.new_block((before[index].owner + self.chance.randint(1, 2)) % RANKS)
        changed = [index for index, block in enumerate(after) if block is not before[index]]
        moves = tuple(Move(before[index], after[index], index) for index in changed)
        one.blocks = after
        one.held |= {move.target.owner for move in moves}
        one.moved |= {move.target for move in moves}
        for rank in self.ranks:
            rank.sequences[one.id].rebalance(Rebalance(one.id, moves, (ROOM,) * RANKS), rank.rank, BLOCK_TOKENS)
        self.counts["widened"] += bool(moves)

    def grow(self, one):
        """As a step does before a row that begins a block."""
        if one.length < len(one.blocks) * BLOCK_TOKENS:
            return
        block = self.new_block()
        one.blocks.append(block)
        one.held.add(block.owner)
        for rank in self.ranks:
            rank.sequences[one.id].add_blocks(sent([block]), rank.rank)
        self.counts["grown"] += 1

    def step(self):
        microbatch, chance = self.chance.randrange(2), self.chance.random
        for index, rows in enumerate(self.rows):
            for one in list(rows):
                full = one.length == ROOM * BLOCK_TOKENS - 1
                if full or chance() < 0.05:
                    self.leave(one.id, index)
                    if full or chance() < 0.5:
                        self.end(one.id)
        if len(self.plain) < 6 and chance() < 0.4:
            self.begin()
        elsewhere = {one.id for one in self.rows[1 - microbatch]}
        for id in [*self.plain]:
            if id not in elsewhere and self.plain[id] not in self.rows[microbatch] and chance() < 0.5:
                self.join(id, microbatch)
        for one in self.rows[microbatch]:
            if chance() < 0.1:
                self.widen(one)
            self.grow(one)
        for rank in self.ranks:
            rank.check(microbatch, self.rows[microbatch])
        for one in self.rows[microbatch]:
            one.length += 1
            one.token = self.chance.randrange(100)
            for rank in self.ranks:
                rank.sequences[one.id].last_token = one.token


@pytest.mark.parametrize("is_native", [False, pytest.param(True, marks=needs_native)])
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_numbers_are_those_of_all_blocks(monkeypatch, seed, is_native):
    if not is_native:
        monkeypatch.setattr(native, "module", None)
    schedule = Schedule(seed)
    for _ in range(250):
        schedule.step()
    assert min(schedule.counts.values()) > 10, schedule.counts


def test_what_is_kept_of_the_same_sequences_is_the_same():
    schedule = Schedule(0)
    schedule.begin()
    schedule.begin()
    first, second = schedule.plain
    schedule.join(first, 0)
    decoding = schedule.ranks[0].decoding[0]
    alone = decoding.sequences
    assert decoding.sequences is alone
    decoding.leave(second)  # which is none of these
    assert decoding.sequences is alone
    schedule.join(second, 0)
    assert [seq.new.id for seq in decoding.sequences] == [first, second]
    assert decoding.frequencies == {seq.frequencies for seq in decoding.sequences}
    assert decoding.records == ()
