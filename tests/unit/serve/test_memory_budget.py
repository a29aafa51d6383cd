"""What long answers may take together."""

import pytest

from longhelix.serve.memory_budget import MemoryBudget
from longhelix.serve.refusals import OverloadedError

pytestmark = pytest.mark.unit


def test_the_sum_is_bounded_and_one_alone_may_have_more():
    room = MemoryBudget(100)
    give_back = room.reserve(250)
    with pytest.raises(OverloadedError, match="try again later"):
        room.reserve(1)
    give_back()
    ends = [room.reserve(25) for _ in range(4)]
    with pytest.raises(OverloadedError):
        room.reserve(1)
    ends[0]()
    room.reserve(25)
    assert room.held_bytes == 100
