"""What a simulated step costs: all requests decode, and one prompt of a given length is computed beside seven decodes,
in chunks that are fixed, or that lars adapts.

Steps per second of processor time, and the process's memory before and after. Requests hold their context already when
the clock starts; the prefix cache is on with --prefix-cache alone, because its index grows with the pool.

    python benchmarks/simulator.py [--running 8 256] [--contexts 1000 100000 1000000] [--prefix-cache]
"""

import argparse
import time
from collections.abc import Iterator

import psutil

from longhelix.measure.bench.environment import environment
from longhelix.perf.setting import Dtypes, Setting
from longhelix.scheduler.config import CacheConfig, SchedulerConfig, ServiceConfig, StepConfig
from longhelix.scheduler.request import MOST_TOKENS, ServiceLevel
from longhelix.simulate.arrival import Arrival
from longhelix.simulate.simulation import Server, Simulation
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model, load_system

STEPS, WARM_UP = 10_000, 5
CHUNKS = ((512, False), (2048, False), (2048, True))  # the most tokens, and whether they adapt
LAYOUT = Layout(kvp=8, tpa=8)
LEVEL = ServiceLevel(ttft_slo_s=10.0, tbt_slo_s=0.1)


def simulation(
    arrivals: list[Arrival], running: int, chunk_tokens: int, prefix_cache: bool, adaptive: bool = False
) -> Simulation:
    blocks = sum(arrival.prompt_tokens + arrival.output_tokens for arrival in arrivals) // 16 // LAYOUT.kvp
    config = SchedulerConfig(
        kvp=LAYOUT.kvp,
        num_blocks=2 * blocks + 1000,
        max_model_len=MOST_TOKENS,
        steps=StepConfig(chunk_tokens, adaptive, running),
        service=ServiceConfig("lars" if adaptive else "fcfs"),
        cache=CacheConfig(prefix_cache),
    )
    setting = Setting(load_model("llama-3.1-405b"), load_system("gb200"), Dtypes("fp4", "fp4", "fp4"))
    server = Server(setting, LAYOUT, config)
    return Simulation(server.make_scheduler(), server.make_runner(), arrivals)


def steps_per_s(run: Simulation, steps: Iterator[object]) -> tuple[float, float, float]:
    """And the process's memory in MB before and after."""
    before = psutil.Process().memory_info().rss / 1e6
    start, count = time.process_time(), 0
    for _ in steps:
        run.step()
        count += 1
    return count / (time.process_time() - start), before, psutil.Process().memory_info().rss / 1e6


def decoding(running: int, context: int, prefix_cache: bool) -> tuple[float, float, float]:
    """Steps in which all requests decode. Their contexts differ, so that every step needs KV blocks for some."""
    arrivals = [Arrival(0.0, context + id, STEPS + 100, LEVEL) for id in range(running)]
    run = simulation(arrivals, running, 2 * running * context, prefix_cache)
    for _ in range(WARM_UP):  # the first has all prompts, at once
        run.step()
    return steps_per_s(run, iter(range(STEPS)))


def mixed(context: int, chunk_tokens: int, prefix_cache: bool, adaptive: bool) -> tuple[float, float, float]:
    """Steps of a prompt's chunks, the first STEPS of them, or as many as there are at least, beside seven decodes."""
    chunks = -(-context // chunk_tokens)
    decodes = [Arrival(0.0, 100 + id, chunks + 100, LEVEL) for id in range(7)]
    run = simulation([*decodes, Arrival(1e-9, context, 1, LEVEL)], 8, chunk_tokens, prefix_cache, adaptive)
    for _ in range(WARM_UP):  # requests arrive
        run.step()
    return steps_per_s(run, iter(range(min(chunks - WARM_UP, STEPS))))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--running", type=int, nargs="+", default=[8, 256])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1000, 100_000, 1_000_000])
    parser.add_argument("--prefix-cache", action="store_true")
    arguments = parser.parse_args()
    conditions = environment("")
    print(
        f"{conditions['cpu']}, Python {conditions['python']}, commit {conditions['commit']}, load averages before "
        f"{conditions['load_average']}; up to {STEPS} steps.\n"
    )
    print("| running | context | chunk | steps/s | memory before, MB | after |")
    print("|--:|--:|--:|--:|--:|--:|")
    for running in arguments.running:
        for context in arguments.contexts:
            speed, before, after = decoding(running, context, arguments.prefix_cache)
            print(f"| {running} | {context:,} | - | {speed:,.0f} | {before:.0f} | {after:.0f} |", flush=True)
    for context in arguments.contexts[1:]:  # a shorter one is over before it can be timed
        for chunk_tokens, adaptive in CHUNKS:
            speed, before, after = mixed(context, chunk_tokens, arguments.prefix_cache, adaptive)
            chunk = f"to {chunk_tokens}, adaptive" if adaptive else chunk_tokens
            print(f"| 8 | {context:,} | {chunk} | {speed:,.0f} | {before:.0f} | {after:.0f} |", flush=True)


if __name__ == "__main__":
    main()
