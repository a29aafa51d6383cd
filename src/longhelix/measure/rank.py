"""One rank of a measurement, `python -m longhelix.measure.rank`: does its job, and prints a JSON line for each point.

Its argument is the job's class, `module:name`; the job lies in the ranks' directory.
"""

import importlib
import json
import sys
import traceback

import msgspec
import torch

from longhelix.errors import PeerLostError, UserError
from longhelix.parallel.collectives import is_lost_peer
from longhelix.workers.started_rank import StartedRank


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
        code = error.code if isinstance(error, UserError) else ""
        # Some jobs call process groups themselves, whose errors no RankGroup has named.
        lost_peer = isinstance(error, PeerLostError) or (isinstance(error, RuntimeError) and is_lost_peer(error))
        if not code and not lost_peer:
            traceback.print_exc()
        cause = str(error) if code else f"{type(error).__name__}: {error}"
        print(json.dumps({"failed": cause, "user_error_code": code, "lost_peer": lost_peer}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
