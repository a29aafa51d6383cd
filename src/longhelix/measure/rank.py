"""Process of one rank of a measurement. It runs the job and prints one JSON line per point.

The command-line argument is the class of the job, in the form `module:name`. The job itself is in the file job.json in
the directory that all ranks share.
"""

import importlib
import json

import msgspec
import torch

from longhelix.engine.workers.failure import failure
from longhelix.engine.workers.started_rank import StartedRank


def main() -> int:
    """Run the job of this rank. Returns the exit status: 0, or 1 if the job failed."""
    started = StartedRank.from_command_line()
    torch.manual_seed(0)
    try:
        module, name = started.arguments[0].split(":")
        job_type = getattr(importlib.import_module(module), name)
        job = msgspec.json.decode((started.directory / "job.json").read_bytes(), type=job_type)
        for row in job.measure(started.rank, started.directory):
            print(json.dumps(row), flush=True)
    except Exception as error:
        print(json.dumps({"failed": msgspec.to_builtins(failure(error))}), flush=True)
        return 1
    return 0
