"""Where reports of measurements go: to a file, or as tables to the terminal."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from longhelix.errors import UserError

if TYPE_CHECKING:  # this module imports torch, so commands import it only when they run
    from longhelix.measure.bench.report import BenchReport

_TABLE_WIDTH = 200  # number of columns if standard output is not a terminal


def check_out(out: Path, kind: str, example: str) -> None:
    """Create the folder of an output file.

    Raises:
        UserError: the suffix differs from that of `example`, or the folder cannot be created or written to.
    """
    if out.suffix != Path(example).suffix or out.is_dir():
        raise UserError(f"--out is {out}, which is not the name of a {kind} file: set it to a file such as {example}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the folder {out.parent} cannot be created ({error.strerror}): set --out to a file in another folder"
        ) from error
    if not os.access(out if out.exists() else out.parent, os.W_OK):
        raise UserError(f"{out if out.exists() else out.parent} is not writable: set --out to a file in another folder")


def show(report: "BenchReport") -> None:
    """Print the tables of a report."""
    console = Console(width=None if sys.stdout.isatty() else _TABLE_WIDTH)
    for shown in report.shown():
        console.print(shown, "", markup=False)
