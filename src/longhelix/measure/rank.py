"""One rank of a measurement: does its job, and prints a JSON line for each point.

Its argument is the job's class, `module:name`; the job lies in the ranks' directory.
"""

import importlib
import json

import msgspec
import torch

from longhelix.engine.workers.failure import failure
from longhelix.engine.workers.started_rank import StartedRank


def main() -> int:
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
