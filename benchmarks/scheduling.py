"""What it costs to plan a step, by how many sequences decode: `schedule`, the message to ranks, one price of a step.

Sequences are of different lengths, so that every step needs KV blocks for some. Processor time, medians and means.

    python benchmarks/scheduling.py [--decodes 8 64 256]
"""

import argparse
import statistics
import time
from array import array

import msgspec

from longhelix.bench.environment import environment
from longhelix.layout import Layout
from longhelix.perf.setting import Setting
from longhelix.perf.step_cost import StepCost
from longhelix.presets import load_model, load_system
from longhelix.request import Request, SampledToken, SamplingParams, StepResult, Work
from longhelix.scheduler.config import SchedulerConfig
from longhelix.scheduler.scheduler import Scheduler

STEPS, WARM_UP, PRICES = 1000, 20, 10_000
MODELS = ("llama-3-8b", "deepseek-r1")


def planned(decodes: int) -> tuple[list[float], list[int]]:
    """Microseconds of `schedule`, and bytes of its messages, of steps in which all decode."""
    scheduler = Scheduler(SchedulerConfig(4, 100_000, 100_000, max_running=decodes, chunk_tokens=100_000))
    sampling = SamplingParams(max_new_tokens=STEPS + 2 * WARM_UP)
    for id in range(decodes):
        scheduler.add(Request(id, array("i", [1] * (50 + id)), sampling, frozenset(), 0, 0.0))
    spent_us, sizes = [], []
    for _ in range(STEPS + WARM_UP):
        start = time.process_time_ns()
        step = scheduler.schedule(0.0)
        spent_us.append((time.process_time_ns() - start) / 1e3)
        sizes.append(len(msgspec.msgpack.encode(step)))
        sampled = tuple(SampledToken(id, 1) for id in range(decodes))
        scheduler.complete(StepResult(step.id, sampled, step.work.rows, 0))
    return spent_us[WARM_UP:], sizes[WARM_UP:]


def price_us(model: str) -> float:
    """Microseconds of one price of a mixed step."""
    setting = Setting(load_model(model), load_system("h100"), "bfloat16", "bfloat16")
    cost, work = StepCost(setting, Layout(kvp=4, tpa=2)), Work.decode(64, 100_000) + Work.chunk(512, 100_000)
    start = time.process_time_ns()
    for _ in range(PRICES):
        cost.seconds(work)
    return (time.process_time_ns() - start) / 1e3 / PRICES


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--decodes", type=int, nargs="+", default=[8, 64, 256])
    arguments = parser.parse_args()
    conditions = environment("")
    print(
        f"{conditions['cpu']}, Python {conditions['python']}, commit {conditions['commit']}, load averages before "
        f"{conditions['load_average']}; {STEPS} steps.\n"
    )
    print("| decodes | schedule, us, median | mean | message, bytes, median |")
    print("|--:|--:|--:|--:|")
    for decodes in arguments.decodes:
        spent_us, sizes = planned(decodes)
        medians = statistics.median(spent_us), statistics.mean(spent_us), statistics.median(sizes)
        print(f"| {decodes} | {medians[0]:.1f} | {medians[1]:.1f} | {medians[2]:.0f} |", flush=True)
    prices = ", ".join(f"{price_us(model):.2f} us for {model}" for model in MODELS)
    print(f"\nOne price of a mixed step: {prices}.")


if __name__ == "__main__":
    main()
