"""One rank of a benchmark, `python -m longhelix.bench.rank`: measures what its job says, a JSON line for each point."""

import argparse
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import msgspec
import torch

from longhelix.bench.calibration import MachineJob, ProductsJob
from longhelix.bench.collectives import CollectivesJob
from longhelix.bench.decode import DecodeJob
from longhelix.bench.kernels import KernelsJob
from longhelix.bench.layouts import LayoutsJob
from longhelix.bench.prefill import PrefillJob
from longhelix.errors import PeerLostError, UserError

Job = KernelsJob | DecodeJob | LayoutsJob | PrefillJob | CollectivesJob | MachineJob | ProductsJob


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    threading.Thread(target=_watch, args=(arguments.directory, arguments.parent), daemon=True).start()
    torch.manual_seed(0)
    try:
        job = msgspec.json.decode((arguments.directory / "job.json").read_bytes(), type=Job)
        for row in job.measure(arguments.rank, arguments.directory):
            print(json.dumps(row), flush=True)
    except Exception as error:
        code = error.code if isinstance(error, UserError) else ""
        lost_peer = isinstance(error, PeerLostError)
        if not code and not lost_peer:
            traceback.print_exc()
        cause = str(error) if code else f"{type(error).__name__}: {error}"
        print(json.dumps({"failed": cause, "user_error_code": code, "lost_peer": lost_peer}), flush=True)
        return 1
    return 0


def _watch(directory: Path, parent: int) -> None:
    """End this process once the one that started it is gone, whatever the main thread does."""
    while os.getppid() == parent:
        time.sleep(0.5)
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
