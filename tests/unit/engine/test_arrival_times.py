"""When a request came, as its caller may say."""

import math

import pytest

from longhelix import UserError
from longhelix.engine.llm import _checked_arrival

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("asked_s", "arrival_s"), [(None, 70.0), (70, 70.0), (12.5, 12.5), (-3, -3.0)])
def test_it_came_then_or_just_now(asked_s, arrival_s):
    assert _checked_arrival(asked_s, 70.0) == arrival_s


@pytest.mark.parametrize("asked_s", [70.001, math.inf, -math.inf, math.nan, "12", True, [1.0]])
def test_it_has_come(asked_s):
    with pytest.raises(UserError, match=r"arrival_s is .*: set it to a time in the past"):
        _checked_arrival(asked_s, 70.0)
