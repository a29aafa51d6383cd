"""The environment variables of ranks."""

import os
from contextlib import suppress
from pathlib import Path


def rank_environment() -> dict[str, str]:
    """The environment of a rank's process: that of this one, with defaults for variables that it does not have."""
    defaults = {
        # OpenMP threads that wait for each other spin briefly, then sleep. With libgomp's own default (300,000 turns)
        # they starve each other beside any other busy process: decode 260 ms against 65 ms per token, measured with
        # the built-in model on two cores and one of them busy; with the machine to itself there is no difference.
        "GOMP_SPINCOUNT": "1000",
        # Huge pages, where the system leaves the choice to programs: attention reads 2 to 4% faster.
        "THP_MEM_ALLOC_ENABLE": "1",
    }
    with suppress(RuntimeError):  # a user without a home, for whom torch's own default stays: a temporary directory
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        defaults["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "longhelix" / "compiled")
    return defaults | os.environ
