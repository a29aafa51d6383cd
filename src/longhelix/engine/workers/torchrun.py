"""Ranks that torchrun starts instead of the engine.

On each host, the first process runs the engine or, on hosts other than the first, the follower. The others become
workers. The ranks of a host share a directory that is named after the process id of torchrun's agent. Torchrun watches
the processes.
"""

import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from longhelix.engine.workers.started_rank import end_with_parent
from longhelix.errors import EngineError, UserError

_ENGINE_START_S = 630.0  # includes the time to wait for other hosts


def is_active() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def join(world_size: int) -> None:
    """Check that torchrun started the layout's ranks. Run all but the first of this host as workers.

    Workers end with SystemExit. Without torchrun, this function does nothing.

    Raises:
        UserError: torchrun started more or fewer ranks than the layout has.
    """
    if not is_active():
        return
    started, hosts = int(os.environ["WORLD_SIZE"]), int(os.environ["GROUP_WORLD_SIZE"])
    if started != world_size:
        number = str(world_size) if hosts == 1 else f"so that {hosts} hosts start {world_size} ranks together"
        raise UserError(
            f"the layout needs {world_size} ranks, but torchrun started {started}: set --nproc-per-node {number}",
            "invalid_layout",
        )
    if int(os.environ["LOCAL_RANK"]):
        parent = os.getppid()  # read before torch is imported; see `end_with_parent`
        from longhelix.engine.workers import worker  # imports torch, which the engine's process does not need

        directory = _await_directory()
        end_with_parent(parent, directory)
        raise SystemExit(worker.serve(directory, own_rank()))


def ranks_of_host() -> tuple[int, ...] | None:
    """Return the ranks that torchrun has started on this host, or None without torchrun."""
    if not is_active():
        return None
    first = own_rank() - int(os.environ["LOCAL_RANK"])
    return tuple(range(first, first + int(os.environ["LOCAL_WORLD_SIZE"])))


def own_rank() -> int:
    """Return the rank for which torchrun started this process."""
    return int(os.environ["RANK"])


def make_directory() -> Path:
    """Make the directory for the sockets of this run. Only this user can enter it.

    Only the first process of each host calls this function.
    """
    path = _directory()
    if path.exists():  # left by an earlier run whose agent had the same process id
        _check_owner(path)
        shutil.rmtree(path)
    path.mkdir(mode=0o700)
    return path


def _directory() -> Path:
    return Path(tempfile.gettempdir()) / f"longhelix-torchrun-{os.getppid()}"


def _await_directory() -> Path:
    path, deadline = _directory(), time.monotonic() + _ENGINE_START_S
    while not (path / "engine").exists():
        if time.monotonic() > deadline:
            raise EngineError(
                f"the first process of this host did not start within {_ENGINE_START_S:.0f} s: see its error"
            )
        time.sleep(0.05)
    _check_owner(path)
    return path


def _check_owner(path: Path) -> None:
    """Raise EngineError if another user may have made the directory."""
    status = path.stat(follow_symlinks=False)
    private = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o700
    if not private or status.st_uid != os.getuid():
        raise EngineError(f"other users have access to {path}: remove it and start again")
