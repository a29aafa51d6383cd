"""Drawn workloads, histograms of what became of them, and the search for the highest rate."""

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longhelix.errors import UserError
from longhelix.simulate.arrival import ScaledWorkload, rate_per_s
from longhelix.simulate.capacity import ATTAINMENT, find_capacity
from longhelix.simulate.histogram import RELATIVE_ERROR, Histogram, rank
from longhelix.simulate.synthetic import Synthetic, parse_mix

pytestmark = pytest.mark.unit


def test_a_mix_is_drawn_by_its_weights_and_within_its_lengths():
    arrivals = list(Synthetic(4000, 8.0, parse_mix("95%:chat,5%:1M-2M:100-500"), seed=5))
    long = [one for one in arrivals if one.prompt_tokens > 100_000]
    assert 0.03 < len(long) / len(arrivals) < 0.07
    assert all(10**6 <= one.prompt_tokens <= 2 * 10**6 and 100 <= one.output_tokens <= 500 for one in long)
    short = [one.prompt_tokens for one in arrivals if one.prompt_tokens < 100_000]
    assert statistics.median(short) == pytest.approx(1020, rel=0.1)
    assert rate_per_s(arrivals) == pytest.approx(8.0, rel=0.1)


@pytest.mark.parametrize(("process", "burstiness", "expected"), [("poisson", 1, 1), ("gamma", 1, 1), ("gamma", 3, 3)])
def test_gaps_have_the_variation_that_was_asked_for(process, burstiness, expected):
    arrivals = list(Synthetic(8000, 2.0, parse_mix("chat"), process=process, burstiness=burstiness))
    times = [0.0, *(one.arrival_s for one in arrivals)]
    gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert statistics.mean(gaps) == pytest.approx(0.5, rel=0.15)
    assert statistics.pstdev(gaps) / statistics.mean(gaps) == pytest.approx(expected, rel=0.15)


def test_a_workload_is_the_same_whenever_it_is_gone_through_and_can_be_sped_up():
    workload = Synthetic(50, 2.0, parse_mix("1:10:20"), seed=9)
    assert list(workload) == list(workload)
    scaled = list(ScaledWorkload(workload, 4.0))
    assert [one.arrival_s * 4 for one in scaled] == pytest.approx([one.arrival_s for one in workload])
    assert rate_per_s(scaled) == pytest.approx(4 * rate_per_s(workload))


@pytest.mark.parametrize(
    "text", ["", "chat,", "95", "x:chat", "0:chat", "nan:chat", "1:5", "1:5:6:7", "1:0:5", "1:9-5:5"]
)
def test_mixes_that_cannot_be(text):
    with pytest.raises(UserError):
        parse_mix(text)


@given(st.lists(st.tuples(st.floats(1e-6, 1e6), st.integers(1, 50)), min_size=1), st.floats(0.1, 100))
def test_percentiles_are_those_of_all_durations_within_the_stated_error(durations, percent):
    histogram = Histogram()
    for seconds, times in durations:
        histogram.add(seconds, times)
    every = sorted(seconds for seconds, times in durations for _ in range(times))
    exact = every[rank(percent, len(every)) - 1]
    assert histogram.percentile(percent) == pytest.approx(exact, rel=1.01 * RELATIVE_ERROR)
    assert histogram.count == len(every)
    assert (histogram.least_s, histogram.most_s) == (every[0], every[-1])
    assert histogram.sum_s == pytest.approx(math.fsum(every))


def test_of_nothing_there_is_no_percentile():
    assert Histogram().percentiles([50, 99]) == [None, None]
    assert Histogram().curve(5) == []


@pytest.mark.parametrize("most_rps", [0.013, 0.9, 1.0, 1.7, 64.0, 5000.0])
def test_the_capacity_is_the_highest_rate_that_is_met(most_rps):
    found = find_capacity(lambda rate: 1.0 if rate <= most_rps else 0.5, 1.0)
    assert found.is_bounded
    assert 0.97 * most_rps <= found.rate_rps <= most_rps
    assert all(trial.is_met == (trial.slo_attainment >= ATTAINMENT) for trial in found.trials)


def test_rates_that_are_all_met_or_all_missed():
    assert not find_capacity(lambda rate: 1.0, 1.0).is_bounded
    assert find_capacity(lambda rate: 0.98, 1.0).rate_rps is None
