"""Process of one rank of a measurement. It runs the job and prints one JSON line per point.

The command-line argument is the class of the job, in the form `module:name`. The job itself is in the file job.json in
the directory that all ranks share.
"""

import importlib
import json
from collections.abc import Callable

import msgspec
import torch

from longhelix.engine.workers.failure import failure
from longhelix.engine.workers.started_rank import StartedRank
from longhelix.measure.hosts import reporter


def main() -> int:
    """Run the job of this rank. Returns the exit status: 0, or 1 if the job failed."""
    started = StartedRank.from_command_line()
    torch.manual_seed(0)
    report = reporter(started.rank, started.directory)
    try:
        module, name = started.arguments[0].split(":")
        job_type = getattr(importlib.import_module(module), name)
        job = msgspec.json.decode((started.directory / "job.json").read_bytes(), type=job_type)
        for row in job.measure(started.rank, started.directory):
            _print(json.dumps(row), report)
    except Exception as error:
        _print(json.dumps({"failed": msgspec.to_builtins(failure(error))}), report)
        return 1
    return 0


def _print(row: str, report: Callable[[str], None]) -> None:
    print(row, flush=True)
    report(row)
