"""Copies of KV blocks among ranks that are threads of this process, against lists of what each block holds."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.kernels import ROWS, TILES, KVFormat, native
from longhelix.compute.runner.copies import copy_blocks
from longhelix.scheduler.kv.blocks import Block
from threaded_ranks import CPU, ThreadGroup

pytestmark = pytest.mark.unit

NUM_BLOCKS, LAYERS = 5, 2
FORMATS = [
    KVFormat("float32", 4, 1, 3, 3, ROWS),
    KVFormat("int8", 4, 2, 3, 3, ROWS),
    KVFormat("bfloat16", 4, 1, 6, 4, ROWS, shared_values=True),
    *([KVFormat("int4", 16, 2, 16, 16, TILES)] if native.module is not None else []),
]


class CountingGroup(ThreadGroup):
    """Keeps the sizes of what it has sent."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.sent = []

    def start_all_to_all(self, send, send_sizes, receive_sizes):
        assert sum(send_sizes) == send.nbytes
        self.sent.append(send_sizes)
        return super().start_all_to_all(send, send_sizes, receive_sizes)


def make_pool(format, rank):
    """Every byte of a block is its own: rank and block."""
    pool = KVPool([{"kv": format}] * LAYERS, NUM_BLOCKS, CPU)
    for block in range(NUM_BLOCKS):
        for entry in pool.entries():
            for bytes_PX in entry.by_block:
                bytes_PX[block] = 16 * rank + block
    return pool


def held(pool):
    """The byte that each block is made of."""
    blocks = []
    for block in range(NUM_BLOCKS):
        bytes_seen = {
            byte for entry in pool.entries() for part in entry.by_block for byte in part[block].unique().tolist()
        }
        assert len(bytes_seen) == 1
        blocks.append(bytes_seen.pop())
    return blocks


def copy(format, kvp, copies):
    """What all pools hold then, and what each rank has sent, by all-to-all."""
    meeting = [None] * kvp, threading.Barrier(kvp)
    groups = [CountingGroup(rank, kvp, meeting) for rank in range(kvp)]
    pools = [make_pool(format, rank) for rank in range(kvp)]
    with ThreadPoolExecutor(kvp) as threads:
        list(threads.map(lambda pool, group: copy_blocks(copies, (), pool, group), pools, groups))
    return [held(pool) for pool in pools], [group.sent for group in groups]


@st.composite
def plans(draw):
    """Ranks, and copies among them: of blocks to other ones, each target once."""
    kvp = draw(st.integers(1, 4))
    blocks = [Block(rank, block) for rank in range(kvp) for block in range(NUM_BLOCKS)]
    targets = draw(st.lists(st.sampled_from(blocks), unique=True, max_size=len(blocks) - 1))
    sources = [block for block in blocks if block not in targets]
    return kvp, tuple((draw(st.sampled_from(sources)), target) for target in targets)


@given(plan=plans(), format=st.sampled_from(FORMATS))
def test_targets_hold_what_sources_held_and_others_what_they_had(plan, format):
    kvp, copies = plan
    found, sent = copy(format, kvp, copies)
    expected = [[16 * rank + block for block in range(NUM_BLOCKS)] for rank in range(kvp)]
    for source, target in copies:
        expected[target.owner][target.id] = 16 * source.owner + source.id
    assert found == expected
    # One exchange for all of them, in which all ranks take part; and none where each copy stays on its rank.
    between = [(source.owner, target.owner) for source, target in copies if source.owner != target.owner]
    block_bytes = LAYERS * format.block_bytes
    for rank in range(kvp):
        sizes = [between.count((rank, peer)) * block_bytes for peer in range(kvp)]
        assert sent[rank] == ([sizes] if between else [])


def test_a_copy_within_a_rank_waits_for_no_other():
    group = CountingGroup(0, 2, ([None] * 2, threading.Barrier(2)))
    pool = make_pool(FORMATS[0], 0)
    copy_blocks(((Block(0, 1), Block(0, 3)), (Block(1, 1), Block(1, 2))), (), pool, group)
    assert held(pool) == [0, 1, 2, 1, 4]
    assert group.sent == []
    assert torch.equal(pool.read([1]), pool.read([3]))


def test_each_kv_group_has_copies_of_its_own_and_only_the_first_one_moves():
    """On two ranks, layers 0 and 2 of one group and layer 1 of another one."""
    format, meeting = FORMATS[0], ([None] * 2, threading.Barrier(2))
    pools = [KVPool([{"kv": format}] * 3, NUM_BLOCKS, CPU, (0, 1, 0), (NUM_BLOCKS + 1,)) for _ in range(2)]
    for rank, pool in enumerate(pools):
        for layer, entries in enumerate(pool.layers):
            for bytes_PX in entries["kv"].by_block:
                bytes_PX[:] = torch.arange(len(bytes_PX)).view(-1, *[1] * (bytes_PX.dim() - 1)) + 16 * rank + 64 * layer
    copies = (
        (Block(0, 1), Block(0, 3)),
        (Block(0, 5), Block(0, 0)),
        (Block(1, 2), Block(0, 4)),
        (Block(1, 3), Block(0, 1)),
    )
    moved = ((Block(1, 0), Block(0, 2)),)
    groups = [CountingGroup(rank, 2, meeting) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda pool, group: copy_blocks(copies, moved, pool, group), pools, groups))

    def held_in(rank, layer):
        return [int(block[0].flatten()[0]) for block in pools[rank].layers[layer]["kv"].by_block[0].unsqueeze(1)]

    for layer, more in ((0, 0), (2, 128)):
        assert held_in(0, layer) == [more + each for each in (0, 1, 16, 1, 18)]
    assert held_in(0, 1) == [64 + each for each in (5, 19, 2, 3, 4, 5)]
    assert [held_in(1, layer)[:5] for layer in range(3)] == [
        [16 + more + at for at in range(5)] for more in (0, 64, 128)
    ]
    sizes = [each.block_bytes() * count for each, count in ((pools[0], 2),)]
    assert groups[1].sent == [[sizes[0] + pools[0].block_bytes(1), 0]]
