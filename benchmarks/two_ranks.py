"""Two processes that run a script as its ranks 0 and 1. Over a link, each calls `longhelix.measure.link.join` first."""

import subprocess
import sys
from collections.abc import Sequence

from longhelix.measure.link import RANKS

TIMEOUT_S = 900


def run_ranks(arguments: Sequence[str]) -> None:
    """Both ranks: this program with `arguments` and --rank; raises SystemExit if one fails."""
    processes = [subprocess.Popen([sys.executable, sys.argv[0], *arguments, "--rank", str(rank)]) for rank in RANKS]
    try:
        statuses = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(statuses):
        raise SystemExit(f"error: the ranks ended with {statuses}")
