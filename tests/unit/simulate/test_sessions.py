"""Sessions, which have one request at a time, by hand."""

import pytest
from test_simulation import run

from longhelix.errors import UserError
from longhelix.scheduler.request import ServiceLevel
from longhelix.simulate.arrival import Arrival, ScaledWorkload
from longhelix.simulate.arrivals import Arrivals
from longhelix.simulate.trace import read_csv

pytestmark = pytest.mark.unit


def in_session(arrival_s, think_s=0.0, session="a"):
    return Arrival(arrival_s, 8, 1, session=session, think_s=think_s)


def test_a_request_of_a_session_comes_when_the_last_one_is_done():
    """Steps of a second, a prompt in each. Those of the session come at 0, 1 + 2, 4 + 2 and, late, at their own time;
    the other one does not wait for any."""
    arrivals = [in_session(0.0), in_session(0.1, 2.0), in_session(0.2, 2.0), Arrival(0.5, 8, 1), in_session(20.0, 2.0)]
    _, seen = run(arrivals)
    came = sorted((record.arrival_s, record.first_s) for record in seen.records.values())
    assert came == [(0.0, 1.0), (0.5, 2.0), (3.0, 4.0), (6.0, 7.0), (20.0, 21.0)]


def test_sessions_do_not_wait_for_each_other():
    arrivals = [in_session(0.0, session="a"), in_session(0.0, session="b"), in_session(0.0, session="a")]
    _, seen = run(arrivals)
    assert sorted(record.arrival_s for record in seen.records.values()) == [0.0, 0.0, 1.0]


def test_a_session_goes_on_after_a_request_that_can_never_run():
    outcome, seen = run([Arrival(0.0, 50_000, 1, session="a"), in_session(0.0, 3.0)])
    assert (outcome.refused, outcome.finished) == (1, 1)
    assert [record.arrival_s for record in seen.records.values()] == [3.0]


def test_a_higher_rate_shortens_the_time_between():
    (_, second) = ScaledWorkload([in_session(1.0), in_session(2.0, 3.0)], 2.0)
    assert (second.arrival_s, second.think_s) == (1.0, 1.5)


def test_nothing_comes_of_a_session_while_its_last_one_runs():
    arrivals = Arrivals([in_session(0.0), in_session(0.0)])
    first = arrivals.take(0.0)
    assert arrivals.take(100.0) is None
    assert arrivals.next_s is None
    arrivals.ended(first, 100.0)
    assert arrivals.take(100.0).arrival_s == 100.0


def test_sessions_in_a_trace():
    lines = ["arrival_s,prompt_tokens,output_tokens,session,think_s", "0,8,1,a,", "1,8,1,a,2.5", "2,8,1,,"]
    read = read_csv(lines, ServiceLevel())
    assert [(arrival.session, arrival.think_s) for arrival in read] == [("a", 0.0), ("a", 2.5), ("", 0.0)]
    with pytest.raises(UserError, match="think_s is set, but session is not"):
        read_csv([lines[0], "0,8,1,,3"], ServiceLevel())
    with pytest.raises(UserError, match="think_s"):
        read_csv([lines[0], "0,8,1,a,-3"], ServiceLevel())
