"""One rank of test_allocation: waves of requests that come and go, and what the process holds between waves."""

import ctypes
import gc
import json
import random
import sys
from array import array
from pathlib import Path

import psutil
import torch.distributed as dist
import toy

sys.path.append(str(Path(__file__).parents[1]))
from longhelix.engine.workers.started_rank import StartedRank
from longhelix.scheduler.loop import Loop
from longhelix.scheduler.request import Request, SamplingParams
from longhelix.scheduler.scheduler import Scheduler
from longhelix.spec import RopeSpec
from scheduler_settings import scheduler_config
from tensors import Tensors
from toy_model import toy_model

SPEC = toy_model(
    architecture="llama",
    num_layers=1,
    hidden_size=48,
    num_query_heads=3,
    num_kv_heads=1,
    head_size=16,
    ffn_size=32,
    vocab_size=48,
    max_positions=4096,
    rms_norm_eps=1e-6,
    rope=RopeSpec(),
    dtype="float32",
)
# Prompt and new tokens, long ones and short, so that extents are opened and closed out of order.
REQUESTS = [(1500, 300), (700, 450), (3, 200), (40, 17), (1, 1), (90, 120), (16, 64), (250, 33), (5, 2), (130, 80)]
NUM_BLOCKS = 400


class MallocInfo(ctypes.Structure):
    """What glibc's mallinfo2 returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = MallocInfo


def held():
    """What this process holds now; `malloc_bytes` are in use, those that torch's tensors lie in among them."""
    gc.collect()
    info, process = mallinfo2(), psutil.Process()
    return {
        "resident_bytes": process.memory_info().rss,
        "malloc_bytes": info.uordblks + info.hblkhd,
        "python_blocks": sys.getallocatedblocks(),
        "gc_objects": len(gc.get_objects()),
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
    }


def run_wave(loop, seed, first_id):
    """All requests, in random order and at random times; returns how many steps it took."""
    chance = random.Random(seed)
    waiting = chance.sample(REQUESTS, len(REQUESTS))
    steps = 0
    while waiting or loop.has_work:
        if waiting and (not loop.has_work or chance.random() < 0.1):
            prompt, new = waiting.pop()
            prompt = array("i", [chance.randrange(SPEC.vocabulary.size) for _ in range(prompt)])
            loop.add(Request(first_id + len(waiting), prompt, SamplingParams(max_new_tokens=new), frozenset(), 0, 0.0))
        if loop.step() is not None:
            steps += 1
    return steps


def main():
    started = StartedRank.from_command_line()
    size, *marks = map(int, started.arguments)
    mesh = toy.join(started, size)
    runner = toy.make_runner(SPEC, mesh, Tensors.of(SPEC), "bfloat16", NUM_BLOCKS)
    scheduler = Scheduler(scheduler_config(kvp=size, num_blocks=NUM_BLOCKS, max_model_len=4096, chunk_tokens=256))
    loop, steps, wave = Loop(scheduler, toy.AtOnce(runner), lambda: 0.0), 0, 0
    for mark in marks:
        while steps < mark:
            steps += run_wave(loop, wave, wave * len(REQUESTS))
            wave += 1
        print(json.dumps({"steps": steps} | held()), flush=True)
    if size > 1:
        dist.destroy_process_group()
    return 0
