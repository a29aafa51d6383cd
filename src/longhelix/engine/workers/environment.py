"""Environment variables of rank processes."""

import os
from contextlib import suppress
from pathlib import Path


def rank_environment() -> dict[str, str]:
    """Return this process's environment with defaults for ranks. Variables that are set already are kept."""
    defaults = {
        # OpenMP threads that wait for each other spin briefly, then sleep. With libgomp's default of 300,000 turns they
        # starve each other when another process is busy: decode took 260 ms per token instead of 65 ms, measured with
        # the built-in model on two cores, one of them busy. On an idle machine there is no difference.
        "GOMP_SPINCOUNT": "1000",
        # Use huge pages if the system lets programs choose. Attention reads 2 to 4% faster.
        "THP_MEM_ALLOC_ENABLE": "1",
    }
    with suppress(RuntimeError):  # without a home directory, torch's default stays: a temporary directory
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        defaults["TORCHINDUCTOR_CACHE_DIR"] = str(cache / "longhelix" / "compiled")
    return defaults | os.environ
