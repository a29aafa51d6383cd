"""Worlds of real processes that stay up for many cases; a case that does not end in time kills its world."""

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

RANK_PROGRAM = Path(__file__).with_name("rank.py")
CASE_TIMEOUT_S = 180


class World:
    """N processes over gloo; `run` gives every rank the same case and returns their arrays, in rank order.

    All ranks have run the same collectives in every step of every case.
    """

    def __init__(self, size):
        self.size = size
        self.directory = tempfile.TemporaryDirectory(prefix="longhelix-test-")
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(RANK_PROGRAM), str(rank), str(size), self.directory.name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

    def run(self, case, timeout_s=CASE_TIMEOUT_S):
        line = json.dumps(case | {"out": self.directory.name}) + "\n"
        watchdog = threading.Timer(timeout_s, self.kill)
        watchdog.start()
        try:
            for process in self.processes:
                process.stdin.write(line)
                process.stdin.flush()
            replies = [process.stdout.readline().strip() for process in self.processes]
        finally:
            watchdog.cancel()
        if replies != ["ok"] * self.size:
            self.kill()  # what a rank that failed left undone would be the next case's
        assert replies == ["ok"] * self.size, f"ranks said {replies} for {case}"
        found = [dict(np.load(Path(self.directory.name) / f"rank{rank}.npz")) for rank in range(self.size)]
        for rank in found:
            assert rank["fingerprints"].tolist() == found[0]["fingerprints"].tolist(), f"collectives differ in {case}"
            assert self.size == 1 or rank["fingerprints"].any()
        return found

    def kill(self):
        for process in self.processes:
            process.kill()

    def close(self):
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        self.directory.cleanup()
