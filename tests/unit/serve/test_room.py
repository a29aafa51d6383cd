"""What long answers may take together."""

import pytest

from longhelix.serve.refusals import OverloadedError
from longhelix.serve.room import Room

pytestmark = pytest.mark.unit


def test_the_sum_is_bounded_and_one_alone_may_have_more():
    room = Room(100)
    give_back = room.take(250)
    with pytest.raises(OverloadedError, match="try again later"):
        room.take(1)
    give_back()
    ends = [room.take(25) for _ in range(4)]
    with pytest.raises(OverloadedError):
        room.take(1)
    ends[0]()
    room.take(25)
    assert room.held_bytes == 100
