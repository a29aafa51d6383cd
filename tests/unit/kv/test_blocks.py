import itertools
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from longhelix.kv.blocks import BlockAllocator

pytestmark = pytest.mark.unit

NUM_BLOCKS = 12


class Allocation(RuleBasedStateMachine):
    """Requests that reserve, grow and leave; a plain set of ids is the model."""

    requests = Bundle("requests")

    def __init__(self):
        super().__init__()
        self.allocator = BlockAllocator(NUM_BLOCKS)
        self.held: dict[int, array[int]] = {}
        self.promised: dict[int, int] = {}
        self.ids = itertools.count()

    @precondition(lambda self: self.allocator.available)
    @rule(target=requests, data=st.data())
    def reserve(self, data):
        count = data.draw(st.integers(0, self.allocator.available))
        request = next(self.ids)
        self.allocator.reserve(count)
        self.held[request], self.promised[request] = array("q"), count
        return request

    @rule(request=requests)
    def take(self, request):
        if self.promised[request]:
            block = self.allocator.take_reserved()
            assert all(block not in ids for ids in self.held.values())
            assert 0 <= block < NUM_BLOCKS
            self.held[request].append(block)
            self.promised[request] -= 1

    @rule(request=consumes(requests))
    def release(self, request):
        self.allocator.release(self.held.pop(request), self.promised.pop(request))

    @invariant()
    def counts_add_up(self):
        held = sum(len(ids) for ids in self.held.values())
        promised = sum(self.promised.values())
        assert self.allocator.reserved == promised
        assert self.allocator.available == NUM_BLOCKS - held - promised

    @invariant()
    def free_lists_stay_small(self):
        runs = self.allocator._runs
        assert sum(len(run.ids) - run.taken for run in runs) == self.allocator._num_free
        assert sum(len(run.ids) for run in runs[:-1]) <= 2 * NUM_BLOCKS


TestAllocation = Allocation.TestCase
TestAllocation.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


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
    with pytest.raises(AssertionError):
        allocator.reserve(2)


def test_a_block_is_only_handed_out_against_a_promise():
    with pytest.raises(AssertionError):
        BlockAllocator(4).take_reserved()


def test_a_released_reservation_is_available_again():
    allocator = BlockAllocator(4)
    allocator.reserve(4)
    block = allocator.take_reserved()
    allocator.release(array("q", [block]), 3)
    assert (allocator.available, allocator.reserved) == (4, 0)


def test_more_is_never_taken_back_than_there_is():
    allocator = BlockAllocator(2)
    with pytest.raises(AssertionError):
        allocator.release(array("q", [0]), 0)
    with pytest.raises(AssertionError):
        allocator.release(array("q"), 1)


def test_what_came_back_is_handed_out_first_and_in_its_order():
    allocator = BlockAllocator(8)
    allocator.reserve(8)
    first, second = (array("q", [allocator.take_reserved() for _ in range(3)]) for _ in range(2))
    assert [*first, *second] == [0, 1, 2, 3, 4, 5]
    allocator.release(first, 0)
    allocator.reserve(3)
    assert [allocator.take_reserved() for _ in range(4)] == [0, 1, 2, 6]
