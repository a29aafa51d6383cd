"""One rank of test_ranks: says how it was started, and does what it is told."""

import json
import os
import signal
import subprocess
import sys
import time

from longhelix.engine.workers.started_rank import StartedRank


def main():
    started = StartedRank.from_command_line()
    task = started.arguments[started.rank]
    found = {"rank": started.rank, "directory": str(started.directory), "arguments": started.arguments}
    found |= {"stdin": sys.stdin.read(), "spins": os.environ["GOMP_SPINCOUNT"]}
    if task == "start a child":
        subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
    print(json.dumps(found), flush=True)
    if task in ("stay", "start a child"):
        time.sleep(600)
    if task == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return int(task)
