"""Groups of instances that share requests: when they are made and dropped, which all of their ranks do alike."""

import gc
import weakref

import pytest

from longhelix.compute.parallel import instance_groups
from longhelix.compute.parallel.instance_groups import InstanceGroups

pytestmark = pytest.mark.unit


class Group:
    """ranks: of all. made: what it was made under."""

    def __init__(self, ranks, made):
        self.ranks, self.size, self.made = ranks, len(ranks), made


class Fabric:
    """Makes groups that know the step in which they were made."""

    def __init__(self, rank):
        self.rank = rank

    def group_in_step(self, groups, step_id):
        (ranks,) = groups
        return Group(ranks, (ranks, step_id))


@pytest.fixture
def four(monkeypatch):
    """What four instances of one rank each have."""
    monkeypatch.setattr(instance_groups, "_KEPT_STEPS", 10)
    return [InstanceGroups(Group((0, 1, 2, 3), None), Fabric(rank)) for rank in range(4)]


def test_ranks_agree_on_a_group_whatever_else_they_do(four):
    """Steps of both, and steps that one of them has without the other."""
    seen = []
    for step_id in range(1, 200):
        shared = step_id % 7 == 0 or 60 < step_id < 80 or step_id > 140
        if step_id % 35 > 20 and step_id < 140:
            shared = False
        for rank in (0, 1) if shared else (step_id % 2,):
            four[rank].begin(step_id)
        if shared:
            first, second = (four[rank].of((0, 1)) for rank in (0, 1))
            assert first.made == second.made
            seen.append(first.made[1])
    assert len(set(seen)) > 2
    assert len(set(seen)) < len(seen) // 2


def test_a_group_that_no_step_needs_is_dropped(four):
    one = four[0]
    one.begin(1)
    dropped = weakref.ref(one.of((0, 1)))
    one.begin(5)
    kept = one.of((0, 2))
    one.begin(12)
    gc.collect()
    assert dropped() is None
    assert one.groups == (kept,)
    one.begin(100)
    assert one.groups == ()


def test_the_group_of_all_instances_is_always_there(four):
    four[0].begin(1)
    everybody = four[0].of((0, 1, 2, 3))
    four[0].begin(1000)
    assert four[0].of((0, 1, 2, 3)) is everybody
    assert four[0].groups == ()
