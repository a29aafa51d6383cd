"""Copies of KV blocks, within a rank and between the ranks of a KVP group, and out of the pool and back."""

from collections.abc import Sequence

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.cache.swap_space import SwapSpace
from longhelix.compute.parallel.collectives import RankGroup
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.step import Step


def copy_blocks(copies: Sequence[tuple[Block, Block]], pool: KVPool, group: RankGroup) -> None:
    """Copy KV blocks, given as (source, target), in all layers. Every rank of the KVP group gets the same `copies`.

    Copies between ranks go in one all-to-all, which all ranks join if there is any such copy. They all read before one
    of them writes, so that one's source may be another one's target. No block is a target twice, and none is both
    source and target where a copy stays on its rank.
    """
    own = group.index
    for source, target in copies:
        if source.owner == target.owner == own:
            pool.copy(source.id, target.id)
    between = [(source, target) for source, target in copies if source.owner != target.owner]
    if not between:
        return
    # By the other rank, and then in the order of `copies`: the same at both ends.
    sent = [
        [source.id for source, target in between if (source.owner, target.owner) == (own, rank)]
        for rank in range(group.size)
    ]
    received = [
        [target.id for source, target in between if (source.owner, target.owner) == (rank, own)]
        for rank in range(group.size)
    ]
    bytes_X = group.all_to_all(
        pool.read([block for blocks in sent for block in blocks]),
        send_sizes=[len(blocks) * pool.block_bytes for blocks in sent],
        receive_sizes=[len(blocks) * pool.block_bytes for blocks in received],
    )
    pool.write([block for blocks in received for block in blocks], bytes_X)


def swap_blocks(step: Step, space: SwapSpace, kvp_rank: int) -> None:
    """Swap this KVP rank's KV blocks, first out, then in. What a block had may go to a slot, and another slot's content
    come into it, or the same slot's into another block."""
    for block, slot in step.swapped_out:
        if block.owner == kvp_rank:
            space.swap_out(block.id, slot)
    for slot, block in step.swapped_in:
        if block.owner == kvp_rank:
            space.swap_in(slot, block.id)
