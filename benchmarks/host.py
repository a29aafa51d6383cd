"""What a rank does between the kernels of one decode step and those of the next, on the host: how long, and of what it
is made, by how many requests decode.

Traced runs of the engine say what fills the time; beside them untraced ones say what a step takes, and what processors
do for it. All are decode steps of the built-in model. Medians; runs of both kinds take turns.

    python benchmarks/host.py [--requests 1 8 64] [--kvp 1 2] [--steps 200] [--turns 3]
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from longhelix import LLM, Layout, SamplingParams
from longhelix.measure.bench.environment import environment

PROMPT_TOKENS = 64
WARM_UP_STEPS = 30
Event = dict[str, Any]
# Between the steps of a traced run, what the trace itself takes.
TRACING = "tracing"
COLUMNS = ["wait", "admit", "batch", "inputs", "sampling", "send", "else"]


def engine(kvp: int, **settings: Any) -> LLM:
    # All prompts in one step: then all requests decode from the next one to the last.
    return LLM("builtin", Layout(kvp=kvp), kv_cache_tokens=64 * 1024, chunk_tokens=8192, **settings)


def decode(llm: LLM, requests: int, steps: int) -> tuple[float, dict[str, float]]:
    """The time of a decode step, and the processor time of one by process: "engine", "rank 0" and so on. In seconds."""
    sampling = SamplingParams(max_new_tokens=steps, ignore_eos=True)
    for index in range(requests):
        llm.add([(index * 31 + place) % 1000 + 1 for place in range(PROMPT_TOKENS)], sampling)
    for _ in range(WARM_UP_STEPS):
        llm.step()
    pids = {"engine": os.getpid()} | {f"rank {rank}": pid for rank, pid in llm.process_ids.items()}
    before, ends_s = {name: processor_s(pid) for name, pid in pids.items()}, []
    for _ in range(steps - 2 * WARM_UP_STEPS):
        assert len(llm.step()) == requests
        ends_s.append(time.perf_counter())
    spent = {name: (processor_s(pid) - before[name]) / len(ends_s) for name, pid in pids.items()}
    while llm.has_work:
        llm.step()
    return statistics.median(after - before for before, after in pairwise(ends_s)), spent


def processor_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def between_kernels(events: list[Event], rank: int) -> dict[str, float]:
    """Of a rank's decode steps, medians in seconds: the time outside of kernels from the end of a step to the end of
    the next, without the trace's own, and the parts of it."""
    own = sorted((event for event in events if event["pid"] == rank), key=lambda event: event["ts"])
    steps = [event for event in own if event["cat"] == "step"]
    found: dict[str, list[float]] = defaultdict(list)
    for last, step in list(pairwise(steps))[WARM_UP_STEPS:-WARM_UP_STEPS]:
        begin, end = last["ts"] + last["dur"], step["ts"] + step["dur"]
        inside = [event for event in own if begin <= event["ts"] < end]
        (send,) = [event for event in inside if event["name"] == "send"]
        kernels = [event for event in inside if event["cat"] in ("compute", "exchange", "collective")]
        parts = {TRACING: send["ts"] - begin}
        for event in inside:
            if event["cat"] == "host":
                # What kernels and collectives of sampling take is theirs.
                within = [one for one in kernels if event["ts"] <= one["ts"] < event["ts"] + event["dur"]]
                parts[event["name"]] = event["dur"] - covered(within)
        whole = end - begin - covered(kernels)
        parts["else"] = whole - sum(parts.values())
        parts["kernels"], parts["outside"] = covered(kernels), whole - parts[TRACING]
        for name, spent in parts.items():
            found[name].append(spent / 1e6)
    return {name: statistics.median(spent) for name, spent in found.items()}


def covered(events: list[Event]) -> float:
    """How long at least one of them lasts."""
    total = until = 0.0
    for event in sorted(events, key=lambda event: event["ts"]):
        begin, end = max(event["ts"], until), event["ts"] + event["dur"]
        if end > begin:
            total, until = total + end - begin, end
    return total


def measure(kvp: int, requests: int, steps: int) -> dict[str, float]:
    with engine(kvp) as llm:
        step_s, spent = decode(llm, requests, steps)
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.json"
        with engine(kvp, trace=trace) as llm:
            traced_s, _ = decode(llm, requests, steps)
        ranks = [between_kernels(json.loads(trace.read_text()), rank) for rank in range(kvp)]
    slowest = max(ranks, key=lambda rank: rank["outside"])
    return slowest | {"step": step_s, "traced": traced_s, "engine": spent["engine"], "rank": spent["rank 0"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--kvp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    conditions = environment("")
    print(
        f"{conditions['cpu']}, {conditions['cores']} cores, commit {conditions['commit']}, load averages before "
        f"{conditions['load_average']}; medians of {arguments.turns} turns, in ms.\n"
    )
    names = ["step", "traced", "kernels", "outside", *COLUMNS, TRACING, "engine", "rank"]
    print(f"| KVP | requests | {' | '.join(names)} |")
    print("|--:" * (2 + len(names)) + "|")
    for kvp in arguments.kvp:
        for requests in arguments.requests:
            turns = [measure(kvp, requests, arguments.steps) for _ in range(arguments.turns)]
            row = [1e3 * statistics.median(turn.get(name, 0.0) for turn in turns) for name in names]
            print(f"| {kvp} | {requests} | {' | '.join(f'{ms:.3f}' for ms in row)} |", flush=True)


if __name__ == "__main__":
    main()
