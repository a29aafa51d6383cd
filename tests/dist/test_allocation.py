"""Ten thousand steps, of requests that come and go, leave a rank with what it had after two thousand."""

import json

import pytest
from world import run_ranks

from longhelix.compute.kernels import native

pytestmark = pytest.mark.dist
WARM, LAST = 2_000, 10_000
# What a leak of every step would exceed by far; what is held varies by the last steps' batches, and by when memory is
# given back to the system.
MOST_GROWTH = {
    "resident_bytes": 2**22,
    "malloc_bytes": (LAST - WARM) * 16,
    "python_blocks": (LAST - WARM) // 20,
    "gc_objects": (LAST - WARM) // 100,
    "descriptors": 0,
    "threads": 0,
}


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(
            2,
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(native.module is None, reason="shared memory is native"),
            ],
        ),
    ],
)
def test_ten_thousand_steps_hold_no_more_than_two_thousand(size):
    marks = [str(WARM), str(LAST)]
    for output in run_ranks("allocation_rank", marks, size, timeout_s=240):
        warm, last = map(json.loads, output.splitlines())
        assert warm["steps"] < 1.5 * WARM
        assert last["steps"] >= LAST
        growth = {name: last[name] - warm[name] for name in MOST_GROWTH}
        print(growth)
        assert {name: found for name, found in growth.items() if found > MOST_GROWTH[name]} == {}
