import os

from hypothesis import settings

# Where files of tests run side by side, each has a core of its own: ranks on others' cores would spin against them.
_WORKER = os.environ.get("PYTEST_XDIST_WORKER")
if _WORKER is not None:
    _CORES = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {_CORES[int(_WORKER.removeprefix("gw")) % len(_CORES)]})

# The oracle's threads would otherwise spin while they wait, and starve the ranks that run beside it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# How long an example takes says more about what else the machine does.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
