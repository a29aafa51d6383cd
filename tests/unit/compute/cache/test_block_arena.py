"""The arena against a dict of lists: extents keep their ids and their place in memory, and moves cost little."""

import random

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from longhelix.compute.cache.block_arena import BlockArena

pytestmark = pytest.mark.unit

NUM_BLOCKS = 12
CPU = torch.device("cpu")


def listed(arena, extent):
    """An extent's ids as kernels find them, by group."""
    begin, end = arena.extents.values[extent.line].tolist()
    return [blocks_X[begin:end].tolist() for blocks_X in arena.blocks]


class Arena(RuleBasedStateMachine):
    extents = Bundle("extents")

    def __init__(self):
        super().__init__()
        self.arena = BlockArena(NUM_BLOCKS, CPU, num_groups=2)
        self.addresses = [blocks_X.data_ptr() for blocks_X in self.arena.blocks]
        self.expected = {}
        self.next_id = 1

    @rule(target=extents, data=st.data())
    def open(self, data):
        room = data.draw(st.integers(0, NUM_BLOCKS - sum(extent.room for extent in self.expected)))
        extent = self.arena.open(room)
        self.expected[extent] = []
        return extent

    @rule(extent=extents, data=st.data())
    def append(self, extent, data):
        count = data.draw(st.integers(0, extent.room - len(self.expected[extent])))
        ids = list(range(self.next_id, self.next_id + count))
        self.next_id += count
        self.arena.append(extent, [ids, [3 * id for id in ids]], [2 * id for id in ids])
        self.expected[extent] += ids

    @rule(extent=consumes(extents))
    def close(self, extent):
        self.arena.close(extent)
        del self.expected[extent]

    @invariant()
    def every_extent_has_its_ids(self):
        assert [blocks_X.data_ptr() for blocks_X in self.arena.blocks] == self.addresses
        for extent, ids in self.expected.items():
            assert listed(self.arena, extent) == self.arena.ids(extent).tolist() == [ids, [3 * id for id in ids]]
            assert self.arena.num_blocks(extent) == len(ids)
            assert self.arena.places(extent).tolist() == [2 * id for id in ids]


TestArena = Arena.TestCase
TestArena.settings = settings(stateful_step_count=40)


def test_a_copy_on_another_device_follows():
    arena = BlockArena(8, CPU)
    arena._device_GX = arena._host_GX.clone()  # as a GPU's
    arena.blocks = arena._device_GX.unbind()
    first, second = arena.open(3), arena.open(5)
    arena.append(first, [[1, 2]], [0, 1])
    arena.append(second, [[3, 4, 5]], [0, 1, 2])
    arena.close(first)
    for _ in range(5):  # at the third the memory is full
        arena.append(opened := arena.open(3), [[6, 7, 8]], [0, 1, 2])
        for extent, ids in ((second, [3, 4, 5]), (opened, [6, 7, 8])):
            assert listed(arena, extent) == [ids]
        arena.close(opened)
    assert arena.extents.values[second.line].tolist() == [0, 3]


@pytest.mark.parametrize("num_blocks", [100, 1000, 10_000])
def test_no_more_ids_are_moved_than_there_was_room_opened_for(num_blocks, monkeypatch):
    moved = 0
    compact = BlockArena._compact

    def counted(arena):
        nonlocal moved
        moved += sum(arena.num_blocks(extent) for extent in arena._live)
        compact(arena)

    monkeypatch.setattr(BlockArena, "_compact", counted)
    arena, chance, live, opened = BlockArena(num_blocks, CPU), random.Random(num_blocks), [], 0
    for _ in range(3000):
        room = chance.choice([0, 1, 7, num_blocks // 3])
        while sum(extent.room for extent in live) + room > num_blocks:
            arena.close(live.pop(chance.randrange(len(live))))
        live.append(arena.open(room))
        arena.append(live[-1], np.arange(room)[None], np.arange(room))
        opened += room
    assert 0 < moved <= opened


def test_a_short_sequence_beside_a_long_one_costs_its_own_blocks_alone(monkeypatch):
    """Neither memory nor what is written grows with the widest sequence times the number of sequences."""
    arena = BlockArena(700_000, CPU)
    arena.append(arena.open(625_000), np.arange(625_000)[None], np.arange(625_000))
    written = []
    monkeypatch.setattr(BlockArena, "_publish", lambda arena, start, stop: written.append(stop - start))
    rows = [arena.open(10) for _ in range(63)]
    for extent in reversed(rows):
        arena.append(extent, [[1]], [0])
        arena.append(extent, [[2]], [1])
    for extent in rows:
        arena.close(extent)
    assert written == [1] * 126
    assert sum(blocks_X.nbytes for blocks_X in arena.blocks) == 2 * 700_000 * 8
