"""Which host runs each rank."""

import pytest

from longhelix.errors import UserError
from longhelix.spec.hosts import Hosts

pytestmark = pytest.mark.unit


def test_consecutive_ranks_keep_groups_inside_a_host():
    hosts = Hosts.in_order([3, 2, 1])
    assert hosts.ranks == ((0, 1, 2), (3, 4), (5,))
    assert [hosts.node_of(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 2]
    assert [hosts.local_rank(rank) for rank in range(6)] == [0, 1, 2, 0, 1, 0]
    assert hosts.world_size == 6


def test_a_mapping_is_read_and_written():
    hosts = Hosts.parse("0-2, 6;3-5")
    assert hosts.ranks == ((0, 1, 2, 6), (3, 4, 5))
    assert Hosts.parse(str(hosts)) == hosts
    assert hosts.local_rank(6) == 3


def test_parts_of_a_group_are_in_the_order_of_hosts():
    hosts = Hosts.parse("0,3;1,2;4")
    assert hosts.parts((1, 3, 4)) == ((3,), (1,), (4,))
    assert hosts.parts((0, 3)) == ((0, 3),)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0-1;x", "contains 'x', which is no range of ranks"),
        ("1-0", "contains '1-0'"),
        ("0;0", "does not place each of ranks"),
        ("0;2", "does not place each of ranks"),
        ("0,1;", "contains ''"),
        ("1;0", "rank 0 is not on the first host"),
        ("0,2,1", "ranks out of order"),
    ],
)
def test_mappings_that_make_no_sense_are_refused(text, words):
    with pytest.raises(UserError, match=words):
        Hosts.parse(text)
