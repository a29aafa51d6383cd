"""Growth: which KVP rank a growing request takes next."""

from collections.abc import Sequence as Items
from dataclasses import replace

from longhelix.scheduler.kv.blocks import BlockAllocator
from longhelix.scheduler.kv.placement import Behind, Continued, Growing, Placement
from longhelix.scheduler.kv.windows import WindowGroup
from longhelix.scheduler.sequence import Sequence


def later_ranks(placement: Placement | Behind) -> tuple[int, ...]:
    """The KVP ranks that a request takes as it grows, which may be in any order; empty where it does not grow."""
    if _growing(placement) is None:
        return ()
    held = placement.blocks_by_owner if isinstance(placement, Continued | Behind) else ()
    return tuple(rank for rank in placement.order[1:] if rank not in held)


def choose_ranks(
    seq: Sequence, num_blocks: int, allocators: Items[BlockAllocator], windows: Items[WindowGroup] = ()
) -> None:
    """Where a sequence that grows to `num_blocks` takes another KVP rank, let it be the one with the most blocks for it
    of those that it does not have yet. What it was promised of the rank whose turn it was, it is promised of that one,
    in groups with a limit as well.
    """
    kv = seq.kv
    growing = _growing(kv.placement)
    if growing is None:
        return
    last = kv.last_owner if kv.num_blocks else kv.placement.start
    held = {last, *(rank for rank, block_ids in enumerate(kv.block_ids) if block_ids)}
    for index in growing.openings(kv.num_blocks, num_blocks):
        in_turn = kv.placement.next_owner(last, index)
        others = [
            rank
            for rank in range(growing.kvp)
            if rank not in held
            and all(group.can_swap(blocks, in_turn, rank) for group, blocks in zip(windows, kv.windows, strict=True))
        ]
        if not others:
            return
        last = max(others, key=lambda rank: (allocators[rank].available + kv.promised[rank], -rank))
        held.add(last)
        if last != in_turn:
            _swap(seq, in_turn, last, allocators)
            for group, blocks in zip(windows, kv.windows, strict=True):
                group.swap(blocks, in_turn, last)


def _swap(seq: Sequence, one: int, other: int, allocators: Items[BlockAllocator]) -> None:
    """Two ranks of which a sequence has no block change places in its order."""
    kv, placement, promised = seq.kv, seq.kv.placement, seq.kv.promised
    if isinstance(placement, Continued):
        assert isinstance(placement.base, Growing)
        kv.placement = replace(placement, base=placement.base.swapped(one, other))
    else:
        assert isinstance(placement, Growing)
        kv.placement = placement.swapped(one, other)
    for rank in (one, other):
        allocators[rank].unreserve(promised[rank])
    promised[one], promised[other] = promised[other], promised[one]
    for rank in (one, other):
        allocators[rank].reserve(promised[rank])


def _growing(placement: Placement | Behind) -> Growing | None:
    base = placement.base if isinstance(placement, Continued | Behind) else placement
    return base if isinstance(base, Growing) else None
