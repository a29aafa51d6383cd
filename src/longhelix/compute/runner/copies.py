"""Copies of KV blocks, within a rank and between the ranks of a KVP group, and out of the pool and back."""

from collections.abc import Sequence
from itertools import chain, cycle, repeat

import torch

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.cache.swap_space import SwapSpace
from longhelix.compute.parallel.collectives import RankGroup
from longhelix.scheduler.kv.blocks import Block
from longhelix.scheduler.step import Step


def copy_blocks(
    copies: Sequence[tuple[Block, Block]], moved: Sequence[tuple[Block, Block]], pool: KVPool, group: RankGroup
) -> None:
    """Copy KV blocks, given as (source, target), as steps have them: `copies` in all layers, where there are several KV
    groups one for each of these at a time; what `moved` in layers of the first group. Every rank of the KVP group gets
    the same.

    Copies between ranks go in one all-to-all, which all ranks join if there is any such copy. They all read before one
    of them writes, so that one's source may be another one's target. No block is a target twice, and none is both
    source and target where a copy stays on its rank.
    """
    own, between = group.index, False
    # By the other rank, then by KV group, and then in the order of `copies`: the same at both ends.
    sent: list[list[list[int]]] = [[[] for _ in range(pool.num_groups)] for _ in range(group.size)]
    received: list[list[list[int]]] = [[[] for _ in range(pool.num_groups)] for _ in range(group.size)]
    of_groups = zip(cycle(range(pool.num_groups)), copies, strict=False)
    for kv_group, (source, target) in chain(of_groups, zip(repeat(0), moved, strict=False)):
        if source.owner != target.owner:
            between = True
            if source.owner == own:
                sent[target.owner][kv_group].append(source.id)
            if target.owner == own:
                received[source.owner][kv_group].append(target.id)
        elif source.owner == own:
            pool.copy(source.id, target.id, kv_group)
    if not between:
        return
    pieces = [pool.read(ids, kv_group) for by_group in sent for kv_group, ids in enumerate(by_group)]
    sizes = [[_num_bytes(pool, by_group) for by_group in of_ranks] for of_ranks in (sent, received)]
    bytes_X = group.all_to_all(torch.cat(pieces), send_sizes=sizes[0], receive_sizes=sizes[1])
    start = 0
    for by_group in received:
        for kv_group, ids in enumerate(by_group):
            stop = start + len(ids) * pool.block_bytes(kv_group)
            pool.write(ids, bytes_X[start:stop], kv_group)
            start = stop


def _num_bytes(pool: KVPool, ids_by_group: Sequence[Sequence[int]]) -> int:
    return sum(len(ids) * pool.block_bytes(kv_group) for kv_group, ids in enumerate(ids_by_group))


def swap_blocks(step: Step, space: SwapSpace, kvp_rank: int) -> None:
    """Swap this KVP rank's KV blocks, first out, then in. What a block had may go to a slot, and another slot's content
    come into it, or the same slot's into another block."""
    for swap in step.transfers.swapped_out:
        if swap.block.owner == kvp_rank:
            space.swap_out(swap.block.id, swap.slot, swap.group)
    for swap in step.transfers.swapped_in:
        if swap.block.owner == kvp_rank:
            space.swap_in(swap.slot, swap.block.id, swap.group)
