"""What it costs to plan a step, by how many sequences decode: `schedule`, the message to ranks, one price of a step.

Sequences are of different lengths, so that every step needs KV blocks for some. Of instances with clocks of their own,
a step is that of those which share requests. Processor time, medians and means.

    python benchmarks/scheduling.py [--decodes 8 64 256] [--cached 10000000]
"""

import argparse
import random
import statistics
import time
from array import array
from collections import deque
from types import SimpleNamespace

import msgspec

from longhelix.measure.bench.environment import environment
from longhelix.perf.setting import Dtypes, Setting
from longhelix.perf.step_cost import StepCost
from longhelix.scheduler.chunk_rule import AdaptiveChunks
from longhelix.scheduler.config import CacheConfig, PlacementConfig, SchedulerConfig, ServiceConfig, StepConfig
from longhelix.scheduler.load import Load
from longhelix.scheduler.request import Request, SamplingParams
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.step import SampledToken, Step, StepResult
from longhelix.scheduler.work import Work
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model, load_system

STEPS, WARM_UP, PRICES = 1000, 20, 10_000
MODELS = ("llama-3-8b", "deepseek-r1")
EVEN = SimpleNamespace(placement=SimpleNamespace(home=None, even=True))  # the KV of a sequence, spread evenly


def planned(decodes: int) -> tuple[list[float], list[float], list[int]]:
    """Microseconds of `schedule` and of `complete`, and bytes of its messages, of steps in which all decode."""
    scheduler = Scheduler(SchedulerConfig(4, 100_000, 100_000, steps=StepConfig(100_000, max_running=decodes)))
    sampling = SamplingParams(max_new_tokens=STEPS + 2 * WARM_UP)
    for id in range(decodes):
        scheduler.add(Request(id, array("i", [1] * (50 + id)), sampling, frozenset(), 0, 0.0))
    return _run(scheduler, decodes)


def busy(decodes: int, cached_tokens: int) -> tuple[list[float], list[float], list[int]]:
    """The same with lars, adaptive chunks of a long prompt beside, and a prefix cache that holds `cached_tokens`."""
    setting = Setting(load_model("llama-3-8b"), load_system("h100"), Dtypes("bfloat16", "bfloat16"))
    cost = StepCost(setting, Layout(kvp=4, tpa=2))
    blocks = cached_tokens // 16
    long_tokens = 4_000_000
    config = SchedulerConfig(
        4,
        blocks,
        2 * long_tokens,
        steps=StepConfig(2048, adaptive=True, max_running=decodes + 1),
        service=ServiceConfig("lars"),
        cache=CacheConfig(prefix_cache=True),
    )
    scheduler = Scheduler(config, cost)
    chance = random.Random(0)
    document = array("i", (chance.randrange(100_000) for _ in range(cached_tokens)))
    for part in range(2):
        tokens = document[part * cached_tokens // 2 : (part + 1) * cached_tokens // 2]
        scheduler.add(Request(-1 - part, tokens, SamplingParams(max_new_tokens=1), frozenset(), 0, 0.0))
        while scheduler.has_work and (step := scheduler.schedule(0.0)) is not None:
            ends = tuple(SampledToken(chunk.id, 1) for chunk in step.chunks if chunk.sample)
            scheduler.complete(StepResult(step.id, ends, 0))
    assert sum(allocator.num_cached for allocator in scheduler.pool.allocators) >= 0.99 * blocks
    sampling = SamplingParams(max_new_tokens=4 * STEPS)
    for id in range(decodes):
        scheduler.add(Request(id, document[id : id + 50 + id], sampling, frozenset(), 0, 0.0))
    for _ in range(40):
        step = scheduler.schedule(0.0)
        scheduler.complete(_result(scheduler, step, decodes))
    long = array("i", (chance.randrange(100_000) for _ in range(long_tokens)))
    scheduler.add(Request(decodes, long, sampling, frozenset(), 0, 0.0))
    return _run(scheduler, decodes)


def on_own_clocks(decodes: int, long_tokens: int) -> tuple[list[float], list[float], list[int]]:
    """The same of four instances with clocks of their own, all of them with a step in flight, and requests of up to
    `long_tokens`, which grow by 4,096 tokens an instance."""
    scheduler = Scheduler(
        SchedulerConfig(
            4,
            200_000,
            100_000,
            steps=StepConfig(4096, max_running=decodes, own_clocks=True),
            placement=PlacementConfig("growing"),
        )
    )
    sampling = SamplingParams(max_new_tokens=8 * STEPS)
    for id in range(decodes):
        prompt = array("i", [1] * (50 + id * long_tokens // decodes))
        scheduler.add(Request(id, prompt, sampling, frozenset(), 0, 0.0))
    joined, in_flight = set[int](), deque[Step]()
    spent_us, completed_us, sizes = [], [], []
    while len(spent_us) < STEPS + WARM_UP:
        decode = len(joined) == decodes
        busy = {at for step in in_flight for at in step.turn.instances}
        start = time.process_time_ns()
        step = scheduler.schedule(0.0, busy)
        if decode and step is not None:
            spent_us.append((time.process_time_ns() - start) / 1e3)
            sizes.append(len(msgspec.msgpack.encode(step)))
        if step is not None:
            joined.update(step.changes.joining)
            in_flight.append(step)
        if step is None or len(busy) + len(step.turn.instances) == 4:
            step = in_flight.popleft()
            result = _team_result(scheduler, step, joined)
            start = time.process_time_ns()
            scheduler.complete(result)
            if decode:
                completed_us.append((time.process_time_ns() - start) / 1e3)
    return spent_us[WARM_UP:], completed_us[WARM_UP:], sizes[WARM_UP:]


def waiting(count: int, cached_tokens: int) -> tuple[list[float], list[float], list[int]]:
    """The same of chunks of a long prompt beside 64 requests that decode, while `count` requests wait that begin with
    the same `cached_tokens`, which are cached and which nobody holds. There is no room for any of them."""
    chunk_tokens, decodes, long_tokens = 512, 64, 2_000_000
    num_blocks = (cached_tokens + long_tokens) // 16 + 100 * decodes
    config = SchedulerConfig(
        1,
        num_blocks,
        num_blocks * 16,
        steps=StepConfig(chunk_tokens, max_running=256),
        service=ServiceConfig("lars"),
        cache=CacheConfig(prefix_cache=True),
    )
    scheduler, chance = Scheduler(config), random.Random(0)
    document, long = (
        array("i", (chance.randrange(100_000) for _ in range(tokens))) for tokens in (cached_tokens, long_tokens)
    )
    scheduler.add(Request(-1, document, SamplingParams(max_new_tokens=1), frozenset(), 0, 0.0))
    while scheduler.has_work and (step := scheduler.schedule(0.0)) is not None:
        scheduler.complete(_result(scheduler, step, decodes))
    sampling = SamplingParams(max_new_tokens=4 * STEPS)
    for id in range(decodes):
        scheduler.add(Request(id, document[-50 - id :], sampling, frozenset(), 0, 0.0))
    for _ in range(40):
        scheduler.complete(_result(scheduler, scheduler.schedule(0.0), decodes))
    scheduler.add(Request(decodes, long, sampling, frozenset(), 0, 0.0))
    scheduler.complete(_result(scheduler, scheduler.schedule(0.0), decodes))
    for id in range(count):
        question = array("i", [id]) * 100_000
        scheduler.add(Request(decodes + 1 + id, document + question, sampling, frozenset(), 0, 0.0))
    times = _run(scheduler, decodes, warm_up=0)  # the first steps look for the prompts
    assert scheduler.num_waiting == count
    return times


def arriving(cached_tokens: int) -> tuple[int, float, float]:
    """Steps of one request that decodes until another begins with `cached_tokens`, all of them cached, and milliseconds
    of the longest `schedule` before the step that it begins in, and of that step."""
    config = SchedulerConfig(
        4,
        cached_tokens // 16 + 100,
        2 * cached_tokens,
        steps=StepConfig(4096),
        cache=CacheConfig(prefix_cache=True),
    )
    scheduler, chance = Scheduler(config), random.Random(0)
    document = array("i", (chance.randrange(100_000) for _ in range(cached_tokens)))
    scheduler.add(Request(-1, document, SamplingParams(max_new_tokens=1), frozenset(), 0, 0.0))
    while scheduler.has_work and (step := scheduler.schedule(0.0)) is not None:
        scheduler.complete(_result(scheduler, step, 1))
    sampling = SamplingParams(max_new_tokens=STEPS)
    scheduler.add(Request(0, array("i", [1] * 50), sampling, frozenset(), 0, 0.0))
    scheduler.complete(_result(scheduler, scheduler.schedule(0.0), 1))
    scheduler.add(Request(1, document + array("i", [1]), sampling, frozenset(), 0, 0.0))
    spent_ms = list[float]()
    while not scheduler.has_begun(1):
        start = time.process_time_ns()
        step = scheduler.schedule(0.0)
        spent_ms.append((time.process_time_ns() - start) / 1e6)
        scheduler.complete(_result(scheduler, step, 1))
    return len(spent_ms), max(spent_ms[:-1]), spent_ms[-1]


def _team_result(scheduler: Scheduler, step: Step, joined: set[int]) -> StepResult:
    """joined: the requests that decode, some of them in steps after this one."""
    ends = {chunk.id for chunk in step.chunks if chunk.sample}
    decode = [
        seq.id
        for seq in scheduler.running
        if seq.id in joined and set(seq.schedule.instances) <= set(step.turn.instances)
    ]
    ids = [id for id in decode if id not in ends and scheduler.prefilled_tokens(id)]
    return StepResult(step.id, tuple(SampledToken(id, 1) for id in (*ends, *ids)), step.work.rows)


def _result(scheduler: Scheduler, step: Step, decodes: int) -> StepResult:
    ends = [chunk.id for chunk in step.chunks if chunk.sample]
    ids = range(decodes) if step.work.decode_rows == decodes else ends
    return StepResult(step.id, tuple(SampledToken(id, 1) for id in ids), step.work.rows)


def _run(scheduler: Scheduler, decodes: int, warm_up: int = WARM_UP) -> tuple[list[float], list[float], list[int]]:
    spent_us, completed_us, sizes = [], [], []
    for _ in range(STEPS + warm_up):
        start = time.process_time_ns()
        step = scheduler.schedule(0.0)
        spent_us.append((time.process_time_ns() - start) / 1e3)
        sizes.append(len(msgspec.msgpack.encode(step)))
        result = _result(scheduler, step, decodes)
        start = time.process_time_ns()
        scheduler.complete(result)
        completed_us.append((time.process_time_ns() - start) / 1e3)
    return spent_us[warm_up:], completed_us[warm_up:], sizes[warm_up:]


def chunk_us(prompts: int) -> float:
    """Microseconds of the choice of chunks for so many prompts."""
    setting = Setting(load_model("llama-3-8b"), load_system("h100"), Dtypes("bfloat16", "bfloat16"))
    rule = AdaptiveChunks(StepCost(setting, Layout(kvp=4, tpa=2)), 2048)
    waiting = [
        SimpleNamespace(prompt_left=300 if index else 10**6, length=100_000, kv=EVEN, is_scored=False)
        for index in range(prompts)
    ]
    besides = [_decoding(100_000 + step) for step in range(STEPS)]
    start = time.process_time_ns()
    for beside in besides:
        rule.sizes(waiting, beside, 0.03)
    return (time.process_time_ns() - start) / 1e3 / STEPS


def _decoding(length: int) -> Load:
    """A row of each of 64 sequences."""
    load = Load(4)
    for _ in range(64):
        load.add_decode(SimpleNamespace(length=length, kv=EVEN))
    return load


def price_us(model: str) -> float:
    """Microseconds of one price of a mixed step."""
    setting = Setting(load_model(model), load_system("h100"), Dtypes("bfloat16", "bfloat16"))
    cost = StepCost(setting, Layout(kvp=4, tpa=2))
    # None is asked for twice, which would take less.
    works = [Work.decode(64, 100_000) + Work.chunk(512, prefix) for prefix in range(PRICES)]
    start = time.process_time_ns()
    for work in works:
        cost.seconds(work)
    return (time.process_time_ns() - start) / 1e3 / PRICES


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--decodes", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--cached", type=int, default=10_000_000, help="tokens in the prefix cache")
    arguments = parser.parse_args()
    conditions = environment("")
    print(
        f"{conditions['cpu']}, Python {conditions['python']}, commit {conditions['commit']}, load averages before "
        f"{conditions['load_average']}; {STEPS} steps.\n"
    )
    print("| decodes | schedule, us, median | mean | complete, median | mean | message, bytes, median |")
    print("|---|--:|--:|--:|--:|--:|")
    for decodes in arguments.decodes:
        print(_row(f"{decodes}", *planned(decodes)), flush=True)
    for decodes in arguments.decodes:
        name = f"{decodes}, lars, adaptive chunks of 4M tokens, {arguments.cached:,} cached"
        print(_row(name, *busy(decodes, arguments.cached)), flush=True)
    for decodes in arguments.decodes:
        for long_tokens in (4_000, 15_000):
            name = f"{decodes} of up to {long_tokens:,} tokens, growing, four clocks"
            print(_row(name, *on_own_clocks(decodes, long_tokens)), flush=True)
    for count in (0, 64):
        name = f"64, chunks of 512, {count} waiting for room with a cached prefix of 1,000,000"
        print(_row(name, *waiting(count, 1_000_000)), flush=True)
    steps, longest_ms, begins_ms = arriving(1_000_000)
    print(
        f"\nA prompt of which 1,000,000 tokens are cached begins in step {steps}: `schedule` of that step takes "
        f"{begins_ms:.1f} ms, of those before it up to {longest_ms:.1f} ms."
    )
    prices = ", ".join(f"{price_us(model):.2f} us for {model}" for model in MODELS)
    print(f"\nOne price of a mixed step: {prices}.")
    print(f"The choice of a chunk: {chunk_us(1):.0f} us for one prompt, {chunk_us(10):.0f} us for ten.")


def _row(name: str, spent_us: list[float], completed_us: list[float], sizes: list[int]) -> str:
    times = [
        f"{each(found):.1f}" for found in (spent_us, completed_us) for each in (statistics.median, statistics.mean)
    ]
    return f"| {name} | {' | '.join(times)} | {statistics.median(sizes):.0f} |"


if __name__ == "__main__":
    main()
