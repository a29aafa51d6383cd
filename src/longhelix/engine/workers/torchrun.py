"""Ranks that torchrun has started in place of the engine: rank 0 keeps the engine, the others become workers.

They find each other by the agent that started them all; torchrun watches its processes.
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
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def join(world_size: int) -> None:
    """Under torchrun, ranks other than 0 serve as workers here and end with SystemExit. Otherwise this does nothing."""
    if not is_active():
        return
    started, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if started != world_size:
        raise UserError(
            f"the layout needs {world_size} ranks, but torchrun started {started}: set --nproc-per-node {world_size}",
            "invalid_layout",
        )
    if local != started:
        raise UserError("ranks on several hosts do not run yet: set --nnodes 1", "invalid_layout")
    rank = int(os.environ["RANK"])
    if rank:
        parent = os.getppid()  # before torch is imported: see `end_with_parent`
        from longhelix.engine.workers import worker  # brings torch, which the engine's own process does without

        directory = _await_directory()
        end_with_parent(parent, directory)
        raise SystemExit(worker.serve(directory, rank))


def make_directory() -> Path:
    """Make the directory in which the ranks of this run meet. Only this user can enter it; rank 0 makes it."""
    path = _directory()
    if path.exists():  # left behind by a run whose agent had the same process id
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
            raise EngineError(f"rank 0 did not start an engine within {_ENGINE_START_S:.0f} s")
        time.sleep(0.05)
    _check_owner(path)
    return path


def _check_owner(path: Path) -> None:
    """Refuse a directory that another user may have prepared."""
    status = path.stat(follow_symlinks=False)
    private = stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o700
    if not private or status.st_uid != os.getuid():
        raise EngineError(f"{path} does not belong to this user alone: remove it and start again")
