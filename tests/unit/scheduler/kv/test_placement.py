from collections import Counter

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from longhelix.errors import UserError
from longhelix.scheduler.kv.placement import Continued, Growing, Local, Striped, striped_length

pytestmark = pytest.mark.unit

KVPS = (2, 3, 4, 8, 16)
BLOCKS = (1, 2, 8, 16, 128)


def owner_list(placement, num_blocks: int) -> list[int]:
    owners = []
    for _ in range(num_blocks):
        owners.append(placement.next_owner(owners[-1] if owners else 0, len(owners)))
    return owners


def all_placements(kvp: int, block_tokens: int, start: int):
    return [
        Striped(kvp, block_tokens, start),
        Local(kvp, block_tokens, start),
        *(Growing(kvp, block_tokens, blocks * block_tokens, start) for blocks in (1, 2, 3)),
    ]


@st.composite
def placements(draw):
    kvp, block_tokens = draw(st.integers(1, 16)), draw(st.integers(1, 24))
    start = draw(st.integers(0, kvp - 1))
    kind = draw(st.sampled_from(["striped", "growing", "local"]))
    if kind == "growing":
        others = draw(st.permutations([rank for rank in range(kvp) if rank != start]))
        later = tuple(others) if draw(st.booleans()) else ()
        return Growing(kvp, block_tokens, block_tokens * draw(st.integers(1, 6)), start, later)
    return (Striped if kind == "striped" else Local)(kvp, block_tokens, start)


@given(placement=placements(), length=st.integers(0, 4000))
def test_closed_forms_agree_with_the_owner_list(placement, length):
    owners = owner_list(placement, -(-length // placement.block_tokens))
    by_token = [owners[position // placement.block_tokens] for position in range(length)]
    assert [placement.owner(position) for position in range(length)] == by_token
    held = Counter(by_token)
    assert [placement.local_length(rank, length) for rank in range(placement.kvp)] == [
        held[rank] for rank in range(placement.kvp)
    ]


@st.composite
def continued(draw):
    """Any placement after any owners."""
    base = draw(placements())
    owners = draw(st.lists(st.integers(0, base.kvp - 1), min_size=1, max_size=40))
    return Continued(base, tuple(owners))


@given(placement=continued(), length=st.integers(0, 4000))
def test_closed_forms_agree_with_the_owner_list_after_any_owners(placement, length):
    block_tokens = placement.block_tokens
    owners = owner_list(placement, max(-(-length // block_tokens), len(placement.owners)))
    assert tuple(owners[: len(placement.owners)]) == placement.owners
    for count in range(len(placement.owners), len(owners)):
        assert owners[count] == placement.base.next_owner(owners[count - 1], count)
    by_token = [owners[position // block_tokens] for position in range(length)]
    assert [placement.owner(position) for position in range(length)] == by_token
    held = Counter(by_token)
    assert [placement.local_length(rank, length) for rank in range(placement.kvp)] == [
        held[rank] for rank in range(placement.kvp)
    ]


@given(
    placement=placements() | continued(), count=st.integers(0, 120), num=st.integers(1, 120), last=st.integers(0, 15)
)
@example(placement=Continued(Local(2, 16), (1,)), count=0, num=1, last=0)
def test_shares_of_blocks_agree_with_one_owner_after_the_other(placement, count, num, last):
    """Also where others went before than the placement would have chosen."""
    last %= placement.kvp
    owners, owner = [], last
    for index in range(count, count + num):
        owner = placement.next_owner(owner, index)
        owners.append(owner)
    found, latest = [None] * num, Counter()
    for rank, many, places in placement.shares(last, count, num):
        assert found[places] == [None] * many != []
        found[places] = [rank] * many
        assert places.start >= latest[rank]  # a rank's ids are handed out in the order of its blocks
        latest[rank] = places.stop
    assert found == owners


@given(base=placements(), num_blocks=st.integers(1, 40), length=st.integers(0, 2**40))
def test_a_placement_that_continues_itself_goes_on_as_if_nothing_had_happened(base, num_blocks, length):
    placement = Continued(base, tuple(owner_list(base, num_blocks)))
    assert placement.follows(base)
    assert (placement.start, placement.spread) == (base.start, base.spread)
    assert placement.owner(length) == base.owner(length)
    for rank in range(base.kvp):
        assert placement.local_length(rank, length) == base.local_length(rank, length)


def test_what_is_local_stays_where_its_first_blocks_are():
    placement = Continued(Local(4, 16, start=1), (3, 3))
    assert [placement.owner(position) for position in (0, 31, 32, 500)] == [3, 3, 3, 3]
    assert not placement.follows(placement.base)
    assert placement.follows(Local(4, 16, start=3))


@given(placement=placements(), length=st.integers(0, 2**40))
def test_local_lengths_sum_to_the_length_and_grow_only_on_the_owner(placement, length):
    before = [placement.local_length(rank, length) for rank in range(placement.kvp)]
    after = [placement.local_length(rank, length + 1) for rank in range(placement.kvp)]
    assert sum(before) == length
    owner = placement.owner(length)
    assert [b - a for a, b in zip(before, after, strict=True)] == [int(rank == owner) for rank in range(placement.kvp)]


@given(placement=placements(), num_blocks=st.integers(0, 200))
def test_each_block_has_an_owner_among_the_ranks(placement, num_blocks):
    assert all(0 <= owner < placement.kvp for owner in owner_list(placement, num_blocks))


def test_local_lengths_of_the_known_case():
    placement = Striped(kvp=2, block_tokens=4)
    lengths = [[placement.local_length(rank, length) for rank in range(2)] for length in (1, 4, 5, 8, 9)]
    assert lengths == [[1, 0], [4, 0], [4, 1], [4, 4], [5, 4]]


def test_a_striped_request_goes_round_from_its_start():
    assert owner_list(Striped(kvp=3, block_tokens=4, start=2), 5) == [2, 0, 1, 2, 0]


def test_a_growing_request_fills_each_rank_then_is_striped():
    placement = Growing(kvp=3, block_tokens=4, limit_tokens=8, start=1)
    assert owner_list(placement, 10) == [1, 1, 2, 2, 0, 0, 1, 2, 0, 1]


def test_a_growing_request_takes_the_later_ranks_in_the_order_chosen():
    placement = Growing(kvp=4, block_tokens=4, limit_tokens=8, start=1, later=(3, 0, 2))
    assert owner_list(placement, 13) == [1, 1, 3, 3, 0, 0, 2, 2, 1, 3, 0, 2, 1]
    assert placement.swapped(3, 2).later == (2, 0, 3)
    assert [*placement.openings(0, 13)] == [2, 4, 6]
    assert [*placement.openings(2, 4)] == [2]
    assert [*placement.openings(3, 4)] == []


@given(order=st.integers(3, 8).flatmap(lambda kvp: st.permutations(range(kvp))), data=st.data())
def test_the_order_of_ranks_that_have_no_block_changes_nothing_that_is_there(order, data):
    """Of a request that grows, and of one that goes on after others' blocks and then grows."""
    limit_blocks = data.draw(st.integers(1, 4))
    base = Growing(len(order), 4, 4 * limit_blocks, order[0], tuple(order[1:]))
    owners = [order[0]] * data.draw(st.integers(0, 5))
    placement = Continued(base, tuple(owners)) if owners else base
    num_blocks = max(len(owners), data.draw(st.integers(0, (len(order) - 2) * limit_blocks)))
    length = data.draw(st.integers(0, 4 * num_blocks))
    there = owner_list(placement, num_blocks)
    free = [rank for rank in order[1:] if rank not in there]
    assume(len(free) > 1)
    one, other = data.draw(st.permutations(free))[:2]
    swapped = base.swapped(one, other)
    swapped = Continued(swapped, tuple(owners)) if owners else swapped
    assert owner_list(swapped, num_blocks) == there
    for rank in range(base.kvp):
        assert swapped.local_length(rank, length) == placement.local_length(rank, length)
    exchanged = {one: other, other: one}
    assert owner_list(swapped, 80) == [exchanged.get(rank, rank) for rank in owner_list(placement, 80)]


def test_a_local_request_stays_on_its_rank():
    placement = Local(kvp=3, block_tokens=4, start=2)
    assert owner_list(placement, 4) == [2, 2, 2, 2]
    assert [placement.local_length(rank, 13) for rank in range(3)] == [0, 0, 13]


def test_a_request_shorter_than_kvp_leaves_ranks_empty():
    placement = Striped(kvp=8, block_tokens=16)
    assert [placement.local_length(rank, 20) for rank in range(8)] == [16, 4, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("block_tokens", BLOCKS)
@pytest.mark.parametrize("kvp", KVPS)
def test_position_to_rank_and_local_index_is_a_bijection(kvp, block_tokens):
    length = 3 * kvp * block_tokens + block_tokens // 2 + 1
    for placement in all_placements(kvp, block_tokens, start=kvp - 1):
        places = []
        for position in range(length):
            rank = placement.owner(position)
            places.append((rank, placement.local_length(rank, position)))
        expected = {(rank, index) for rank in range(kvp) for index in range(placement.local_length(rank, length))}
        assert set(places) == expected
        assert len(expected) == length


@pytest.mark.parametrize("block_tokens", BLOCKS)
@pytest.mark.parametrize("kvp", KVPS)
def test_values_scattered_by_owner_gather_back_by_position(kvp, block_tokens):
    length = 5 * kvp * block_tokens + block_tokens // 2 + 1
    for placement in all_placements(kvp, block_tokens, start=1):
        owners = owner_list(placement, -(-length // block_tokens))
        shards: list[list[int]] = [[] for _ in range(kvp)]
        for position in range(length):
            shards[owners[position // block_tokens]].append(position)
        gathered = []
        for position in range(length):
            rank = placement.owner(position)
            gathered.append(shards[rank][placement.local_length(rank, position + 1) - 1])
        assert gathered == list(range(length))
        # The causal mask: what a query at a position sees on a rank is a prefix of that rank's shard.
        for position in (0, block_tokens, length // 2, length - 1):
            seen = sorted(
                key for rank in range(kvp) for key in shards[rank][: placement.local_length(rank, position + 1)]
            )
            assert seen == list(range(position + 1))


def test_striped_ranks_differ_by_one_block_at_most():
    for length in range(200):
        lengths = [striped_length(4, 3, turn, length) for turn in range(3)]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] - lengths[-1] <= 4


@pytest.mark.parametrize("limit_tokens", [0, -16, 8, 17, 40])
def test_a_growth_limit_that_is_no_multiple_of_the_block_is_refused(limit_tokens):
    with pytest.raises(UserError, match=f"growth limit is {limit_tokens} tokens: set it to a multiple of .* 16 tokens"):
        Growing(kvp=2, block_tokens=16, limit_tokens=limit_tokens)
