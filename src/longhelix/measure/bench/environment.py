"""Collects the conditions of a measurement for reports."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

from longhelix.compute.machine import host

# If the load average at the start is above this value, the report warns that the machine was not idle.
IDLE_LOAD = 0.5


def environment(date: str) -> dict[str, object]:
    """Collect the conditions at the start of a run: the machine, versions and load."""
    from longhelix.compute.kernels import native

    return {
        "date": date,
        "cpu": host.processor(),
        "instruction_set": native.module.instruction_set() if native.module else "none: no native kernels",
        "cores": host.cores(),
        "last_level_cache_bytes": host.last_level_cache_bytes(),
        "memory_bytes": host.memory_bytes(),
        "available_memory_bytes": host.available_bytes(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "longhelix": importlib.metadata.version("longhelix"),
        "commit": _commit(),
    }


def _commit() -> str | None:
    """Commit of the checkout that contains this package, with a mark if files have changed. None without a checkout."""
    package = Path(__file__).parents[2]
    if not _git(package, "ls-files", "__init__.py"):
        return None
    changed = _git(package, "status", "--porcelain", "--untracked-files=no")
    return _git(package, "rev-parse", "--short", "HEAD") + (" with changes" if changed else "")


def _git(directory: Path, *arguments: str) -> str:
    """Return the output of a git command.

    The output is empty if git is not installed, or if `directory` is not in a checkout.
    """
    try:
        done = subprocess.run(("git", "-C", str(directory), *arguments), capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
