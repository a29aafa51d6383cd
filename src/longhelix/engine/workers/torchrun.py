"""Ranks that torchrun starts instead of the engine. Rank 0 runs the engine, and the other ranks become workers.

The ranks share a directory that is named after the process id of torchrun's agent. Torchrun watches the processes.
"""

import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from longhelix.engine.workers.started_rank import end_with_parent
from longhelix.errors import EngineError, UserError

_ENGINE_START_S = 120.0


def is_active() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def join(world_size: int) -> None:
    """Check that torchrun started the layout's ranks. Run ranks other than 0 as workers, which end with SystemExit.

    Without torchrun, this function does nothing.

    Raises:
        UserError: torchrun started more or fewer ranks than the layout has, or it started ranks on several hosts.
    """
    if not is_active():
        return
    started, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if started != world_size:
        raise UserError(
            f"the layout needs {world_size} ranks, but torchrun started {started}: set --nproc-per-node {world_size}",
            "invalid_layout",
        )
    if local != started:
        raise UserError(
            f"torchrun started {started} ranks, but only {local} on this host, and ranks on several hosts are not "
            "supported: set --nnodes 1",
            "invalid_layout",
        )
    rank = int(os.environ["RANK"])
    if rank:
        parent = os.getppid()  # read before torch is imported; see `end_with_parent`
        from longhelix.engine.workers import worker  # imports torch, which the engine's process does not need

        directory = _await_directory()
        end_with_parent(parent, directory)
        raise SystemExit(worker.serve(directory, rank))


def make_directory() -> Path:
    """Make the directory for the sockets of this run. Only this user can enter it. Only rank 0 calls this function."""
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
            raise EngineError(f"rank 0 did not start an engine within {_ENGINE_START_S:.0f} s: see the error of rank 0")
        time.sleep(0.05)
    _check_owner(path)
    return path


def _check_owner(path: Path) -> None:
    """Raise EngineError if another user may have made the directory."""
    status = path.stat(follow_symlinks=False)
    private = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o700
    if not private or status.st_uid != os.getuid():
        raise EngineError(f"other users have access to {path}: remove it and start again")
