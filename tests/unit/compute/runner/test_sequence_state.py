"""A widened sequence as ranks follow it: their blocks stay in position order, with those that come in between."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longhelix.compute.cache.block_arena import BlockArena
from longhelix.compute.runner.sequence_state import SequenceState, sequence_numbers
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.kv.windows import as_sent
from longhelix.scheduler.request import SamplingParams
from longhelix.scheduler.step import InitialKV, Move, NewSequence, Rebalance

pytestmark = pytest.mark.unit

BLOCK_TOKENS = 4


@given(
    owners=st.lists(st.integers(0, 2), min_size=2, max_size=20),
    source=st.integers(0, 2),
    targets=st.lists(st.sampled_from([None, 1, 2]), min_size=20, max_size=20),
    missing=st.integers(0, BLOCK_TOKENS - 1),
)
def test_blocks_come_and_go_in_the_middle(owners, source, targets, missing):
    """Any but the last block moves from one rank to the others."""
    before = [Block(owner, 100 + index) for index, owner in enumerate(owners)]
    after, moves = list(before), []
    for index, block in enumerate(before[:-1]):
        if block.owner == source and targets[index] is not None:
            after[index] = Block((source + targets[index]) % 3, 200 + index)
    for index, block in enumerate(after):
        if block is not before[index]:
            moves.append(Move(before[index], block, index))
    room = tuple(sum(block.owner == rank for block in after) for rank in range(3))
    length = len(owners) * BLOCK_TOKENS - missing
    for rank in range(3):
        arena = BlockArena(60, torch.device("cpu"), num_groups=2)
        # In the second group those that move have passed.
        windows = [Block(block.owner, 300 + index if block in after else -1) for index, block in enumerate(before)]
        sent = as_sent(tuple(before), [windows])
        new = NewSequence(7, SamplingParams(), 0, 100, InitialKV((20, 20, 20), False, length, sent))
        seq = SequenceState(new, torch.zeros(2), sequence_numbers(3), arena)
        seq.begin(rank, BLOCK_TOKENS)
        seq.rebalance(Rebalance(7, tuple(moves), room), rank, BLOCK_TOKENS)
        own = [index for index, block in enumerate(after) if block.owner == rank]
        assert arena.ids(seq.extent).tolist() == [
            [after[index].id for index in own],
            [300 + index if after[index] is before[index] else 0 for index in own],
        ]
        assert arena.places(seq.extent).tolist() == [at for at, block in enumerate(after) if block.owner == rank]
        assert seq.extent.room == room[rank]
        assert seq.holders >= {block.owner for block in after}
        last = after[-1].owner == rank
        assert seq.last_owner == after[-1].owner
        assert seq.local_length == room[rank] * BLOCK_TOKENS - (missing if last else 0)
