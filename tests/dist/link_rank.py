"""One rank of test_link: rank 1 sends over a link, rank 0 asks for it after a pause and prints how long that takes, in
seconds, and in how many pieces it came."""

import json
import time
from pathlib import Path

import torch
import torch.distributed as dist

from longhelix.compute.runner.rank import meet
from longhelix.engine.workers.started_rank import StartedRank
from longhelix.measure.link import join

REPEATS = 5


def main():
    started = StartedRank.from_command_line()
    rank, (size, *points) = started.rank, started.arguments
    link = join(rank, started.directory)
    meet(int(size), rank, started.directory, interface=link.device)
    for point in points:
        rate_mbit, num_bytes = point.split(":")
        dist.barrier()
        link.limit(float(rate_mbit))
        transfer(rank, int(num_bytes))  # connections hear of the limit
        found = [transfer(rank, int(num_bytes)) for _ in range(REPEATS)]
        if rank == 0:
            print(json.dumps({"took_s": [took_s for took_s, _ in found], "pieces": [count for _, count in found]}))
    return 0


def transfer(rank, num_bytes):
    """Seconds from the question to the last byte, and the pieces that rank 0's device has received in the meantime."""
    asked, sent = torch.zeros(1), torch.zeros(num_bytes, dtype=torch.uint8)
    dist.barrier()
    time.sleep(0.05)
    if rank == 1:
        dist.recv(asked, 0)
        dist.send(sent, 0)
        return None
    before, start_s = received(), time.perf_counter()
    dist.send(asked, 1)
    dist.recv(sent, 1)
    return time.perf_counter() - start_s, received() - before


def received():
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[1]) for line in lines if "link0" in line)
