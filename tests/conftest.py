import os

# The oracle's threads would otherwise spin while they wait, and starve the ranks that run beside it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
