import itertools
from array import array
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from asserts import fails_an_assert
from longhelix.scheduler.kv.blocks import Block, BlockAllocator, set_hashes

pytestmark = pytest.mark.unit

NUM_BLOCKS = 12


def set_hash(allocator, block, content):
    set_hashes([allocator], [Block(0, block)], [content])


class Allocation(RuleBasedStateMachine):
    """Requests that reserve, grow, begin with others' blocks or cached ones, name them and leave; plain lists are the
    model."""

    requests = Bundle("requests")

    def __init__(self):
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.held: dict[int, array[int]] = {}
        self.promised: dict[int, int] = {}
        self.found: dict[bytes, int] = {}
        self.cached: list[int] = []  # the next to be handed out first
        self.ids = itertools.count()

    @precondition(lambda self: self.allocator.available)
    @rule(target=requests, data=st.data())
    def reserve(self, data):
        return self.begin(array("q"), data)

    @rule(target=requests, source=requests, data=st.data())
    def fork(self, source, data):
        """A request that begins with blocks of another one, which may have them from a third."""
        ids = self.held[source]
        shared = data.draw(st.lists(st.sampled_from(ids), unique=True)) if ids else []
        self.allocator.share(shared)
        return self.begin(array("q", shared), data)

    @precondition(lambda self: self.cached and self.allocator.available)
    @rule(target=requests, data=st.data())
    def revive(self, data):
        """A request that begins with what nobody holds any more."""
        most = self.allocator.available
        found = data.draw(st.lists(st.sampled_from(self.cached), unique=True, min_size=1, max_size=most))
        assert all(self.allocator.is_cached(block) for block in found)
        self.allocator.share(found)
        self.cached = [block for block in self.cached if block not in found]
        return self.begin(array("q", found), data)

    def begin(self, ids, data):
        count = data.draw(st.integers(0, self.allocator.available))
        request = next(self.ids)
        self.allocator.reserve(count)
        self.held[request], self.promised[request] = ids, count
        return request

    @rule(request=requests, content=st.sampled_from([b"a", b"b", b"c"]), data=st.data())
    def set_hash(self, request, content, data):
        unnamed = [block for block in self.held[request] if block not in self.found.values()]
        if unnamed:
            block = data.draw(st.sampled_from(unnamed))
            set_hash(self.allocator, block, content)
            self.found.setdefault(content, block)

    @rule(request=requests)
    def take(self, request):
        if self.promised[request]:
            self.hand_out(request, self.allocator.take_reserved())
            self.promised[request] -= 1

    @precondition(lambda self: self.allocator.available)
    @rule(request=requests)
    def grow(self, request):
        self.hand_out(request, self.allocator.take())

    def hand_out(self, request, block):
        """A free one as long as there is any, then the one that was released the longest ago."""
        held = self.held_blocks()
        assert block not in held
        assert 0 <= block < NUM_BLOCKS
        if len(held) + len(self.cached) == NUM_BLOCKS:
            assert block == self.cached.pop(0)
            self.found = {content: other for content, other in self.found.items() if other != block}
        assert block not in self.cached
        self.held[request].append(block)

    @rule(request=consumes(requests))
    def release(self, request):
        ids = self.held.pop(request)
        kept = [block for block in reversed(ids) if block in self.found.values()]
        self.allocator.release(array("q", ids), self.promised.pop(request))
        self.cached += [block for block in kept if block not in self.held_blocks()]

    @rule()
    def forget(self):
        self.allocator.forget()
        self.found = {content: block for content, block in self.found.items() if block not in self.cached}
        self.cached = []

    def held_blocks(self):
        return {block for ids in self.held.values() for block in ids}

    @invariant()
    def blocks_are_found_by_their_content(self):
        assert self.allocator.index == {content: Block(0, block) for content, block in self.found.items()}
        assert list(self.allocator._cached) == self.cached
        assert self.allocator.num_cached == len(self.cached)

    @invariant()
    def nothing_is_kept_of_blocks_without_a_second_holder_or_a_hash(self):
        count = Counter(block for ids in self.held.values() for block in ids)
        assert self.allocator._extra_holders == {block: held - 1 for block, held in count.items() if held > 1}
        assert sorted(self.allocator._hashes) == sorted(self.found.values())

    @invariant()
    def counts_add_up(self):
        held = len(self.held_blocks())
        promised = sum(self.promised.values())
        assert self.allocator.reserved == promised
        assert self.allocator.available == NUM_BLOCKS - held - promised  # cached ones are
        assert self.allocator._num_free + held + len(self.cached) == NUM_BLOCKS

    @invariant()
    def free_lists_stay_small(self):
        free = self.allocator._free
        assert sum(len(freed.ids) - freed.taken for freed in free) == self.allocator._num_free
        assert sum(len(freed.ids) for freed in free[:-1]) <= 2 * NUM_BLOCKS


TestAllocation = Allocation.TestCase
TestAllocation.settings = settings(stateful_step_count=40)


def test_ids_are_unique_until_the_pool_is_empty():
    allocator = BlockAllocator(5)
    allocator.reserve(5)
    ids = array("q", [allocator.take_reserved() for _ in range(5)])
    assert sorted(ids) == [0, 1, 2, 3, 4]
    assert allocator.available == 0
    allocator.release(ids, 0)
    assert allocator.available == 5


def test_what_was_promised_is_not_available_to_others():
    allocator = BlockAllocator(4)
    allocator.reserve(3)
    assert allocator.available == 1
    with fails_an_assert():
        allocator.reserve(2)


def test_a_block_is_only_handed_out_against_a_promise():
    with fails_an_assert():
        BlockAllocator(4).take_reserved()


def test_a_released_reservation_is_available_again():
    allocator = BlockAllocator(4)
    allocator.reserve(4)
    block = allocator.take_reserved()
    allocator.release(array("q", [block]), 3)
    assert (allocator.available, allocator.reserved) == (4, 0)


def test_more_is_never_taken_back_than_there_is():
    allocator = BlockAllocator(2)
    with fails_an_assert():
        allocator.release(array("q", [0]), 0)
    with fails_an_assert():
        allocator.release(array("q"), 1)


def test_what_came_back_is_handed_out_first_and_in_its_order():
    allocator = BlockAllocator(8)
    allocator.reserve(8)
    first, second = (array("q", [allocator.take_reserved() for _ in range(3)]) for _ in range(2))
    assert [*first, *second] == [0, 1, 2, 3, 4, 5]
    allocator.release(first, 0)
    allocator.reserve(3)
    assert [allocator.take_reserved() for _ in range(4)] == [0, 1, 2, 6]


def taken(allocator, count):
    allocator.reserve(count)
    return array("q", [allocator.take_reserved() for _ in range(count)])


def test_a_shared_block_is_free_when_its_last_holder_has_released_it():
    allocator = BlockAllocator(6)
    ids = taken(allocator, 4)
    allocator.share(ids[:2])
    allocator.share(ids[:1])
    allocator.release(ids, 0)
    assert allocator.available == 4
    allocator.release(array("q", [1]), 0)
    allocator.release(array("q", [0]), 0)
    assert allocator.available == 5
    allocator.release(array("q", [0]), 0)
    assert allocator.available == 6


def test_what_nobody_else_holds_comes_back_in_its_order():
    allocator = BlockAllocator(8)
    ids = taken(allocator, 6)
    allocator.share([1, 4])
    allocator.release(ids, 0)
    assert list(taken(allocator, 6)) == [0, 2, 3, 5, 6, 7]


def test_freed_ids_that_nobody_shares_are_kept_as_they_are():
    allocator = BlockAllocator(8)
    shared, ids = taken(allocator, 2), taken(allocator, 4)
    allocator.share(shared)
    set_hash(allocator, 0, b"content")
    allocator.release(ids, 0)
    assert allocator._free[-1].ids is ids


def test_of_two_blocks_with_the_same_content_the_first_is_found():
    allocator = BlockAllocator(4)
    first, second = taken(allocator, 1), taken(allocator, 1)
    set_hash(allocator, first[0], b"content")
    set_hash(allocator, first[0], b"content")
    set_hash(allocator, second[0], b"content")
    assert allocator.index[b"content"] == Block(0, first[0])
    allocator.release(second, 0)
    allocator.release(first, 0)
    assert allocator.index[b"content"] == Block(0, first[0])
    assert (allocator.available, allocator.num_cached) == (4, 1)
    assert first[0] not in taken(allocator, 3)
    taken(allocator, 1)
    assert not allocator.index


def test_of_a_sequence_the_last_blocks_are_handed_out_first():
    """What is before them is still found then, and what is behind a gap is not."""
    allocator = BlockAllocator(4)
    older, newer = taken(allocator, 2), taken(allocator, 2)
    for block in range(4):
        set_hash(allocator, block, bytes([block]))
    allocator.release(older, 0)
    allocator.release(newer, 0)
    assert list(taken(allocator, 4)) == [1, 0, 3, 2]


def test_ranks_share_one_index():
    ranks = (first := BlockAllocator(2)), BlockAllocator(2, rank=1, index=first.index)
    for allocator in ranks:
        taken(allocator, 2)
    set_hashes(ranks, [Block(1, 0), Block(0, 0), Block(0, 1)], [b"content", b"content", b"other"])
    assert first.index == {b"content": Block(1, 0), b"other": Block(0, 1)}
    for allocator in ranks:
        allocator.release(array("q", [0, 1]), 0)
    assert [allocator.num_cached for allocator in ranks] == [1, 1]
    assert (first.is_cached(1), ranks[1].is_cached(0)) == (True, True)


def test_the_content_of_a_block_does_not_change():
    allocator = BlockAllocator(4)
    taken(allocator, 1)
    set_hash(allocator, 0, b"content")
    with fails_an_assert():
        set_hash(allocator, 0, b"other")
