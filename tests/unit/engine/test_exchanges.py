"""What a request saw of the exchanges, as a difference of totals, against the sum over its own steps."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhelix.engine.exchanges import ExchangeLog, HopB
from longhelix.scheduler.step import StepMeasurements

pytestmark = pytest.mark.unit

STEPS = st.lists(
    st.tuples(st.integers(1, 6), st.one_of(st.none(), st.integers(0, 100).map(float))) | st.just((1, 0.0)), max_size=40
)


@given(STEPS, st.sampled_from([1, 2]), st.data())
def test_a_request_sees_the_steps_between_its_arrival_and_its_end(steps, kvp, data):
    arrival = data.draw(st.integers(0, len(steps)))
    log = ExchangeLog(kvp)
    moments = [log.now]
    for parts, exposed_s in steps:
        log.add(StepMeasurements(exposed_s=exposed_s, parts=parts))
        moments.append(log.now)
    own = steps[arrival:]
    assert log.since(moments[arrival]) == HopB(
        parts=max((parts for parts, _ in own), default=1),
        exchanges=sum(parts for parts, _ in own) if kvp > 1 else 0,
        exposed_s=None if any(s is None for _, s in own) else sum(s for _, s in own),
    )


def test_the_log_keeps_no_more_than_the_parts_that_there_are():
    log = ExchangeLog(2)
    for index in range(10_000):
        log.add(StepMeasurements(exposed_s=0.0, parts=index * 7919 % 13 + 1))
    assert len(log._peaks) <= 13
