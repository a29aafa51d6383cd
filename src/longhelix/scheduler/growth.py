"""Growth: which KVP rank a growing request takes next."""

from collections.abc import Sequence as Items
from dataclasses import replace

from longhelix.scheduler.kv.blocks import BlockAllocator
from longhelix.scheduler.kv.placement import Behind, Continued, Growing, Placement
from longhelix.scheduler.kv.windows import WindowGroup
from longhelix.scheduler.sequence import Sequence


def later_ranks(placement: Placement | Behind) -> tuple[int, ...]:
    """Return the KVP ranks that a request takes as it grows, in any order. Empty if it does not grow."""
    if _growing(placement) is None:
        return ()
    owners = placement.blocks_by_owner if isinstance(placement, Continued | Behind) else ()
    return tuple(rank for rank in placement.order[1:] if rank not in owners)


def choose_ranks(
    seq: Sequence, num_blocks: int, allocators: Items[BlockAllocator], windows: Items[WindowGroup] = ()
) -> None:
    """Choose the next KVP ranks of a sequence that grows to `num_blocks`: the ones with the most blocks for it.

    Only ranks without blocks of the sequence are chosen. A chosen rank exchanges its place in the order, and its
    reservations in all groups, with the rank whose turn it was.
    """
    kv = seq.kv
    growing = _growing(kv.placement)
    if growing is None:
        return
    last = kv.last_owner if kv.num_blocks else kv.placement.start
    owners = {last, *(rank for rank, block_ids in enumerate(kv.block_ids) if block_ids)}
    for index in growing.openings(kv.num_blocks, num_blocks):
        in_turn = kv.placement.next_owner(last, index)
        candidates = [
            rank
            for rank in range(growing.kvp)
            if rank not in owners
            and all(group.can_swap(blocks, in_turn, rank) for group, blocks in zip(windows, kv.windows, strict=True))
        ]
        if not candidates:
            return
        last = max(candidates, key=lambda rank: (allocators[rank].available + kv.reserved[rank], -rank))
        owners.add(last)
        if last != in_turn:
            _swap(seq, in_turn, last, allocators)
            for group, blocks in zip(windows, kv.windows, strict=True):
                group.swap(blocks, in_turn, last)


def _swap(seq: Sequence, first: int, second: int, allocators: Items[BlockAllocator]) -> None:
    """Exchange two ranks without blocks of a sequence in its order, with their reservations."""
    kv, placement, reserved = seq.kv, seq.kv.placement, seq.kv.reserved
    if isinstance(placement, Continued):
        assert isinstance(placement.base, Growing)
        kv.placement = replace(placement, base=placement.base.swapped(first, second))
    else:
        assert isinstance(placement, Growing)
        kv.placement = placement.swapped(first, second)
    for rank in (first, second):
        allocators[rank].unreserve(reserved[rank])
    reserved[first], reserved[second] = reserved[second], reserved[first]
    for rank in (first, second):
        allocators[rank].reserve(reserved[rank])


def _growing(placement: Placement | Behind) -> Growing | None:
    base = placement.base if isinstance(placement, Continued | Behind) else placement
    return base if isinstance(base, Growing) else None
