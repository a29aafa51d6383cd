import os

from hypothesis import settings

# The oracle's threads would otherwise spin while they wait, and starve the ranks that run beside it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# How long an example takes says more about what else the machine does.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
