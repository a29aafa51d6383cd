"""Code for the process of a rank. It reads the rank and the directory, and ends the process when its parent is gone."""

import argparse
import atexit
import os
import shutil
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_POLL_S = 0.5


@dataclass(frozen=True)
class StartedRank:
    """The process of a rank, as `Ranks` has started it."""

    rank: int
    directory: Path  # holds the sockets and files that the ranks share
    arguments: tuple[str, ...]  # arguments of the module that it runs

    @classmethod
    def from_command_line(cls) -> Self:
        """Read the command line, and make this process end when its parent is gone."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--rank", type=int, required=True)
        parser.add_argument("--directory", type=Path, required=True)
        parser.add_argument("--parent", type=int, required=True)
        parser.add_argument("arguments", nargs="*")
        found = parser.parse_args()
        end_with_parent(found.parent, found.directory)
        with suppress(OSError):  # /proc may not be writable
            # A forked process has the command line of its parent, so only this name distinguishes the ranks.
            Path("/proc/self/comm").write_text(f"longhelix {found.rank}")
        return cls(found.rank, found.directory, tuple(found.arguments))


def end_with_parent(parent: int, directory: Path) -> None:
    """Make this process end and remove `directory` when `parent` is gone, even if its main thread is blocked.

    The process also ignores SIGINT, because the process that started the ranks handles this signal. It ignores SIGTTOU,
    so a terminal does not stop the process when it prints.

    Args:
        parent: process id of the parent. The caller passes the id, because the system would return the id of another
            process if the parent is already gone.
        directory: the directory to remove.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    atexit.register(_clean_up_after, parent, directory)
    threading.Thread(target=_await_end, args=(parent, directory), daemon=True).start()


def _await_end(parent: int, directory: Path) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    _clean_up_after(parent, directory)
    os._exit(1)


def _clean_up_after(parent: int, directory: Path) -> None:
    """Remove the directory if the parent is gone.

    This function also runs when a rank exits before it has noticed that its parent is gone.
    """
    if os.getppid() != parent:
        shutil.rmtree(directory, ignore_errors=True)
