"""The process of a rank, as it sees itself: its number, its parent, and that it ends with its parent."""

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
    """This process, as `Ranks` has started it.

    rank: its number. directory: where the ranks meet. arguments: those of its module.
    """

    rank: int
    directory: Path
    arguments: tuple[str, ...]

    @classmethod
    def from_command_line(cls) -> Self:
        """Read the command line; from now on this process ends with its parent."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--rank", type=int, required=True)
        parser.add_argument("--directory", type=Path, required=True)
        parser.add_argument("--parent", type=int, required=True)
        parser.add_argument("arguments", nargs="*")
        found = parser.parse_args()
        end_with_parent(found.parent, found.directory)
        with suppress(OSError):  # where /proc cannot be written
            Path("/proc/self/comm").write_text(f"longhelix {found.rank}")  # its command line is that of its parent
        return cls(found.rank, found.directory, tuple(found.arguments))


def end_with_parent(parent: int, directory: Path) -> None:
    """From now on, leave interrupts to whoever started the ranks, and end this process, whatever its main thread does,
    once `parent` is gone; `directory` is removed. A terminal does not stop it for what it prints.

    A rank is told its parent's id, because the parent may be gone by now, and the id that the system then gives is
    another's.
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
    """Also of a rank that ends by itself before it has noticed."""
    if os.getppid() != parent:
        shutil.rmtree(directory, ignore_errors=True)
