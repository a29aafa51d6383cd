"""Copies KV blocks within a rank, between the ranks of a KVP group, and between the pool and swap space."""

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
    """Copy KV blocks, given as pairs (source, target). All ranks of the KVP group call this with the same arguments.

    Copies between ranks travel in one all-to-all, which all ranks join if there is any such copy. All ranks read before
    any rank writes, so a source may be the target of another copy. No block is a target twice. No block
    of a copy within a rank is both source and target.

    Args:
        copies: Copies in all layers. If there are several KV groups, consecutive pairs belong to consecutive groups.
        moved: Copies in layers of the first KV group.
    """
    rank, crosses_ranks = group.index, False
    # Ids by other rank, then by KV group, then in the order of `copies`. Both ranks use the same order.
    sent_ids: list[list[list[int]]] = [[[] for _ in range(pool.num_groups)] for _ in range(group.size)]
    received_ids: list[list[list[int]]] = [[[] for _ in range(pool.num_groups)] for _ in range(group.size)]
    of_groups = zip(cycle(range(pool.num_groups)), copies, strict=False)
    for kv_group, (source, target) in chain(of_groups, zip(repeat(0), moved, strict=False)):
        if source.owner != target.owner:
            crosses_ranks = True
            if source.owner == rank:
                sent_ids[target.owner][kv_group].append(source.id)
            if target.owner == rank:
                received_ids[source.owner][kv_group].append(target.id)
        elif source.owner == rank:
            pool.copy(source.id, target.id, kv_group)
    if not crosses_ranks:
        return
    pieces = [pool.read(ids, kv_group) for by_group in sent_ids for kv_group, ids in enumerate(by_group)]
    sizes = [[_num_bytes(pool, by_group) for by_group in of_ranks] for of_ranks in (sent_ids, received_ids)]
    bytes_X = group.all_to_all(torch.cat(pieces), send_sizes=sizes[0], receive_sizes=sizes[1])
    start = 0
    for by_group in received_ids:
        for kv_group, ids in enumerate(by_group):
            stop = start + len(ids) * pool.block_bytes(kv_group)
            pool.write(ids, bytes_X[start:stop], kv_group)
            start = stop


def _num_bytes(pool: KVPool, ids_by_group: Sequence[Sequence[int]]) -> int:
    return sum(len(ids) * pool.block_bytes(kv_group) for kv_group, ids in enumerate(ids_by_group))


def swap_blocks(step: Step, space: SwapSpace, kvp_rank: int) -> None:
    """Swap this KVP rank's KV blocks, first out, then in. A block or slot may take part in both directions."""
    for swap in step.transfers.swapped_out:
        if swap.block.owner == kvp_rank:
            space.swap_out(swap.block.id, swap.slot, swap.group)
    for swap in step.transfers.swapped_in:
        if swap.block.owner == kvp_rank:
            space.swap_in(swap.slot, swap.block.id, swap.group)
