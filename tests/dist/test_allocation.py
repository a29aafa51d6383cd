"""Thousands of steps, of requests that come and go, leave a rank with what it had after a fifth of them."""

import json

import pytest
from world import run_ranks

from longhelix.kernels import native

pytestmark = pytest.mark.dist


def most_growth(steps):
    """What a leak of every step would exceed by far; what is held varies by the last steps' batches, and by when memory
    is given back to the system."""
    return {
        "resident_bytes": 2**22,
        "malloc_bytes": steps * 16,
        "python_blocks": steps // 20,
        "gc_objects": steps // 100,
        "descriptors": 0,
        "threads": 0,
    }


@pytest.mark.parametrize("last", [6_000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(2, marks=pytest.mark.skipif(native.module is None, reason="shared memory is native")),
    ],
)
def test_thousands_of_steps_hold_no_more_than_a_fifth_of_them(size, last):
    warm = last // 5
    for output in run_ranks("allocation_rank", [str(warm), str(last)], size, timeout_s=240):
        early, late = map(json.loads, output.splitlines())
        assert early["steps"] < 1.5 * warm
        assert late["steps"] >= last
        growth = {name: late[name] - early[name] for name in most_growth(last - warm)}
        print(growth)
        assert {name: found for name, found in growth.items() if found > most_growth(last - warm)[name]} == {}
