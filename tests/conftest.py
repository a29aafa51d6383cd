import os

# The oracle's threads would otherwise spin while they wait, and starve the ranks that run beside it.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
