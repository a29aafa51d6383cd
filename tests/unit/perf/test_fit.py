"""The fit of a system's constants: from times that the model made itself it finds what they were made with."""

from dataclasses import replace

import numpy as np
import pytest

from longhelix.perf import fit
from longhelix.perf.fit import (
    COLLECTIVE_CONSTANTS,
    LINK_CONSTANTS,
    REQUEST_CONSTANTS,
    MeasuredCollective,
    MeasuredRequest,
)
from longhelix.perf.setting import Dtypes, Setting
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model, load_system

pytestmark = pytest.mark.unit

# A machine of a few cores.
TRUTH = load_system("h100").replaced(
    {
        "memory_bytes_per_s": 35e9,
        "flops_per_s.bfloat16": 420e9,
        "memory_efficiency": 0.83,
        "compute_efficiency": 0.71,
        "attention_efficiency": 0.64,
        "kernel_s": 1e-6,
        "step_s": 1e-3,
        "shared": True,
        "in_switch_reduction": False,
        "collective_s": 2e-6,
        "scale_up.latency_s": 6e-6,
        "scale_up.bytes_per_s": 5e9,
        "scale_up.ranks": 64,
    },
    "made up",
)
REQUESTS = [
    *(MeasuredRequest(Layout(), context, None, 0.0) for context in (2048, 32768)),
    *(MeasuredRequest(Layout(), prompt, 512, 0.0) for prompt in (512, 4096)),
]
COLLECTIVES = [
    MeasuredCollective(name, ranks, size_bytes, 0.0)
    for name in ("all-reduce", "all-to-all", "all-gather", "reduce-scatter")
    for ranks in (2, 4)
    for size_bytes in (2048, 32768, 524288)
]


def setting(system=TRUTH):
    return Setting(load_model("builtin"), system, Dtypes("bfloat16", "bfloat16"))


def timed(points, seconds, noise=0.0):
    factors = np.exp(noise * np.random.default_rng(7).standard_normal(len(points)))
    return [replace(point, seconds=float(each)) for point, each in zip(points, seconds * factors, strict=True)]


def guessed(names):
    """The machine with other values for what is to be found."""
    return TRUTH.replaced({name: TRUTH.constants[name] / 3 for name in names}, "guess")


def distance(found, names):
    return max(abs(found.constants[name] / TRUTH.constants[name] - 1) for name in names)


def test_runs_give_back_the_fractions_that_they_were_made_with():
    requests = timed(REQUESTS, fit.request_seconds(setting(), REQUESTS))
    found = fit.fit_requests(setting(guessed(REQUEST_CONSTANTS)), requests)
    assert distance(found, REQUEST_CONSTANTS) < 1e-3
    assert found.sources["memory_efficiency"] == "fitted: 4 decode steps and prefills"
    assert found.sources["step_s"] == "made up"


def test_calls_give_back_the_costs_that_they_were_made_with():
    collectives = timed(COLLECTIVES, fit.collective_seconds(TRUTH, COLLECTIVES))
    assert distance(fit.fit_collectives(guessed(COLLECTIVE_CONSTANTS), collectives), COLLECTIVE_CONSTANTS) < 1e-3


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_calls_between_hosts_give_back_the_link_that_they_were_made_with(ranks_per_host):
    truth = TRUTH.replaced(
        {"scale_up.ranks": ranks_per_host, "scale_out.latency_s": 2e-4, "scale_out.bytes_per_s": 1e8}, "made up"
    )
    between = [each for each in COLLECTIVES if each.ranks == 2 * ranks_per_host]
    measured = timed(between, fit.collective_seconds(truth, between))
    found = fit.fit_link(truth.replaced(dict.fromkeys(LINK_CONSTANTS, 1.0), "guess"), measured)
    for name in LINK_CONSTANTS:
        assert found.constants[name] == pytest.approx(truth.constants[name], rel=2e-3), name
    assert found.sources["scale_out.latency_s"] == "fitted: 12 collectives between hosts"
    assert found.network.scale_up == truth.network.scale_up


@pytest.mark.parametrize("cores", [1, 2, 3, 64])
@pytest.mark.parametrize(("collective_s", "latency_s"), [(2e-6, 6e-6), (6e-6, 2e-6), (1e-5, 1e-6)])
def test_the_fixed_cost_is_told_from_the_latency_of_peers(cores, collective_s, latency_s):
    """Groups of two and of four ranks wait for one and three peers, and on fewer cores longer for each of them."""
    truth = TRUTH.replaced({"cores": cores, "collective_s": collective_s, "scale_up.latency_s": latency_s}, "made up")
    measured = timed(COLLECTIVES, fit.collective_seconds(truth, COLLECTIVES))
    found = fit.fit_collectives(truth.replaced(dict.fromkeys(COLLECTIVE_CONSTANTS[:2], 5e-6), "guess"), measured)
    for name in COLLECTIVE_CONSTANTS:
        assert found.constants[name] == pytest.approx(truth.constants[name], rel=2e-3), name
    assert found.sources["collective_s"] == "fitted: 24 collectives"


def test_groups_that_take_turns_wait_longer_for_each_peer():
    one_core, two_cores = (
        fit.collective_seconds(
            TRUTH.replaced({"cores": cores}, "made up"), [MeasuredCollective("all-gather", 4, 0, 0.0)]
        )[0]
        for cores in (1, 2)
    )
    assert two_cores == pytest.approx(2e-6 + 3 * 2 * 6e-6)
    assert one_core == pytest.approx(2e-6 + 3 * 4 * 6e-6)


def test_groups_of_one_size_leave_the_fixed_cost_as_it_was_and_say_so():
    pairs = [each for each in timed(COLLECTIVES, fit.collective_seconds(TRUTH, COLLECTIVES)) if each.ranks == 2]
    known = TRUTH.replaced({"scale_up.latency_s": 2e-6, "scale_up.bytes_per_s": 1e9}, "guess")
    found = fit.fit_collectives(known, pairs)
    assert distance(found, COLLECTIVE_CONSTANTS) < 1e-3
    assert found.sources["collective_s"] == "assumed: groups of one size tell nothing of it"
    elsewhere = fit.fit_collectives(known.replaced({"collective_s": 1e-6}, "guess"), pairs)
    assert elsewhere.fixed.collective_s == 1e-6
    assert elsewhere.network.scale_up.latency_s == pytest.approx(7e-6, rel=1e-3)


def test_noise_moves_constants_no_further_than_itself():
    requests = timed(REQUESTS, fit.request_seconds(setting(), REQUESTS), noise=0.03)
    assert distance(fit.fit_requests(setting(guessed(REQUEST_CONSTANTS)), requests), REQUEST_CONSTANTS) < 0.1
    collectives = timed(COLLECTIVES, fit.collective_seconds(TRUTH, COLLECTIVES), noise=0.03)
    found = fit.fit_collectives(guessed(COLLECTIVE_CONSTANTS), collectives)
    assert distance(found, ("scale_up.latency_s", "scale_up.bytes_per_s")) < 0.1


def test_a_constant_on_which_nothing_depends_stays():
    steps = [request for request in timed(REQUESTS, fit.request_seconds(setting(), REQUESTS)) if request.chunk is None]
    found = fit.fit_requests(setting(guessed(REQUEST_CONSTANTS)), steps)
    assert distance(found, ("memory_efficiency",)) < 1e-3
    assert found.arithmetic.attention_efficiency == pytest.approx(TRUTH.arithmetic.attention_efficiency / 3)


def test_no_fraction_goes_beyond_one():
    requests = timed(REQUESTS, fit.request_seconds(setting(), REQUESTS) / 2)
    found = fit.fit_requests(setting(), requests)
    assert found.memory.efficiency == found.arithmetic.efficiency == found.arithmetic.attention_efficiency == 1.0


def test_requests_are_predicted_in_their_order_with_nothing_overlapped():
    mixed = [REQUESTS[2], REQUESTS[0], MeasuredRequest(Layout(kvp=2), 2048, None, 0.0), REQUESTS[3]]
    seconds = fit.request_seconds(setting(), mixed)
    assert [fit.request_seconds(setting(), [request])[0] for request in mixed] == pytest.approx(list(seconds))
    assert seconds[2] > seconds[1]  # the same bytes and more, and collectives
