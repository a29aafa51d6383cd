"""Worlds of real processes: for many cases, or for one program to its end. What does not end in time is killed."""

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import numpy as np

from longhelix.engine.workers.ranks import Ranks

CASE_TIMEOUT_S = 180
_PATHS = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join(_PATHS)}  # programs of ranks are modules of this folder


class World:
    """N processes over gloo; `run` gives every rank the same case and returns their arrays, in rank order.

    All ranks of a stage have run the same collectives in every step of every case.
    """

    def __init__(self, size):
        self.size = size
        self.ranks = Ranks()
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.ranks.start("rank", range(size), str(size), environment=ENVIRONMENT, **pipes)

    @property
    def is_up(self):
        return not self.ranks.statuses()

    def run(self, case, timeout_s=CASE_TIMEOUT_S):
        directory, processes = self.ranks.directory, self.ranks.processes.values()
        line = json.dumps(case | {"out": str(directory)}) + "\n"
        with self.ranks.watched(timeout_s) as watch:
            for process in processes:
                process.stdin.write(line)
                process.stdin.flush()
            replies = [process.stdout.readline().strip() for process in processes]
        if replies != ["ok"] * self.size:
            self.ranks.kill()  # what a rank that failed left undone would be the next case's
        assert replies == ["ok"] * self.size, f"ranks said {replies} for {case}: {watch.error}"
        found = [dict(np.load(directory / f"rank{rank}.npz")) for rank in range(self.size)]
        in_stage = self.size // case.get("pp", 1)
        for rank, arrays in enumerate(found):
            first = found[rank - rank % in_stage]
            assert arrays["fingerprints"].tolist() == first["fingerprints"].tolist(), f"collectives differ in {case}"
            assert in_stage == 1 or arrays["fingerprints"].any()
        return found

    def close(self):
        for process in self.ranks.processes.values():
            with suppress(BrokenPipeError):  # what a rank that is gone was to be told
                process.stdin.close()
        self.ranks.wait(10)
        self.ranks.close()


def run_ranks(program, arguments, size, timeout_s):
    """What each rank of `program`, a module of this folder, printed; they are gone when this returns, in `timeout_s` at
    the latest."""
    with Ranks() as ranks:
        ranks.start(program, range(size), str(size), *arguments, environment=ENVIRONMENT, stdout=subprocess.PIPE)
        with ranks.watched(timeout_s) as watch:
            outputs = [process.stdout.read() for process in ranks.processes.values()]
            ranks.wait(timeout_s)
        assert watch.error is None
        assert not any(ranks.statuses().values())
    return outputs
