import os

import pytest
from hypothesis import settings

# Where files of tests run side by side, each has a core of its own: ranks on others' cores would spin against them.
_CORES = sorted(os.sched_getaffinity(0))
_WORKER = os.environ.get("PYTEST_XDIST_WORKER")
if _WORKER is not None:
    os.sched_setaffinity(0, {_CORES[int(_WORKER.removeprefix("gw")) % len(_CORES)]})

# The oracle's threads would otherwise spin while they wait, and starve the ranks that run beside it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# How long an example takes says more about what else the machine does. `make test` takes the same examples each time,
# so that a change is judged by what it changes, and keeps none that failed; `make test-all` asks for many, wherever it
# runs for others each time.
settings.register_profile("few", deadline=None, max_examples=30, derandomize=True)
settings.register_profile("many", deadline=None, max_examples=200, derandomize=False)
settings.load_profile("few")


@pytest.fixture(scope="module")
def all_cores():
    """For tests whose ranks are to run at the same time indeed, or with several threads."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _CORES)
    yield
    os.sched_setaffinity(0, own)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup():
    _forget_test()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call():
    _forget_test()


def _forget_test():
    """Ranks are forked from one process while the environment, which has the test's name, stays the same."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)
