"""What a step costs on the host, and a request in a worker, as one request's context grows: all of it should be flat.

One request of each length runs beside 63 short ones, in rows of no order, on one rank whose layers compute nothing:
scheduling, messages and the preparation of a batch are what is left. Processor time, medians of decode steps.

    python benchmarks/long_context.py [--tokens 10000 100000 1000000 10000000]
"""

import argparse
import random
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import torch
from torch import Tensor

from longhelix.compute.cache.pool import KVPool
from longhelix.compute.kernels import ROWS, KVFormat
from longhelix.compute.parallel.mesh import Mesh
from longhelix.compute.runner.execution import Execution
from longhelix.compute.runner.rank import find
from longhelix.compute.runner.runner import ModelRunner
from longhelix.measure.bench.environment import environment
from longhelix.scheduler.config import SchedulerConfig
from longhelix.scheduler.request import Request, SamplingParams
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.step import SampledToken, Step, StepResult
from longhelix.spec import RopeSpec
from longhelix.spec.layout import Layout

SHORT_REQUESTS, SHORT_TOKENS, NEW_TOKENS, CHUNK_TOKENS, STEPS = 63, 100, 1500, 8192, 100
BLOCK_TOKENS = 16
SPEC = SimpleNamespace(rope=RopeSpec(), rotated_size=128, vocab_size=1000)
COLUMNS = {
    "schedule_us": "schedule, us",
    "message_us": "encode and decode, us",
    "message_bytes": "message, bytes",
    "batch_us": "batch, us",
    "chunk_bytes": "largest message, bytes",
    "kept_bytes": "a worker keeps, bytes",
    "resident_mib": "its memory grows by, MiB",
    "end_us": "end, us",
}


class NoLayers:
    """A model whose layers compute nothing."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def embed(self, token_ids_T: Tensor) -> Tensor:
        return token_ids_T.unsqueeze(1).float()

    def run_layers(self, hidden_TH: Tensor, batch: object, pool: KVPool) -> Tensor:
        return hidden_TH

    def logits(self, hidden_SH: Tensor) -> Tensor:
        return torch.zeros(len(hidden_SH), SPEC.vocab_size)


def make_runner(num_blocks: int) -> ModelRunner:
    mesh = Mesh.build(Layout(), 0)
    format = KVFormat("bfloat16", BLOCK_TOKENS, 1, 16, 16, ROWS)
    pool = KVPool({"kv": format}, num_layers=0, num_blocks=num_blocks, device=torch.device("cpu"))
    model = NoLayers(mesh)
    op_by_op = Execution.resolve(compile=False, replay=False, whole=False, found=find(mesh, model, pool))
    return ModelRunner(SPEC, mesh, model, pool, op_by_op)


def prefill(scheduler: Scheduler, decoding: list[int]) -> Iterator[bytes]:
    """The messages of the steps until all requests decode."""
    while True:
        step = scheduler.schedule(0.0)
        yield msgspec.msgpack.encode(step)
        decoding += step.joining
        sampled = [*decoding, *(chunk.id for chunk in step.chunks if chunk.sample)]
        scheduler.complete(result(step, sampled))
        if len(sampled) == SHORT_REQUESTS + 1:
            return


def result(step: Step, sampled: list[int]) -> StepResult:
    return StepResult(step.id, tuple(SampledToken(id, 0) for id in sampled), step.work.rows, 0)


def seconds_of(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def measure(tokens: int) -> dict[str, float]:
    """The row of one length."""
    chance = random.Random(0)
    num_blocks = sum(
        -(-count // BLOCK_TOKENS) for count in [tokens + NEW_TOKENS] + [SHORT_TOKENS + NEW_TOKENS] * SHORT_REQUESTS
    )
    config = SchedulerConfig(1, num_blocks, tokens + NEW_TOKENS, BLOCK_TOKENS, CHUNK_TOKENS)
    scheduler = Scheduler(config)
    lengths = [tokens] + [SHORT_TOKENS] * SHORT_REQUESTS
    order = chance.sample(range(len(lengths)), len(lengths))
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS)
    # Kept, as the engine's front keeps them: the memory of a prompt is not given back when its request ends.
    requests = [Request(id, array("i", bytes(4 * lengths[id])), sampling, frozenset(), 0, 0.0) for id in order]
    for request in requests:
        scheduler.add(request)
    decoding: list[int] = []
    messages = list(prefill(scheduler, decoding))
    decoder, process = msgspec.msgpack.Decoder(Step), psutil.Process()
    before_bytes = process.memory_info().rss
    runner = make_runner(num_blocks)
    tracemalloc.start()
    for message in messages:
        runner.execute(decoder.decode(message))
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    resident_bytes = process.memory_info().rss - before_bytes
    seconds: dict[str, list[float]] = {name: [] for name in ("schedule", "message", "batch")}
    sizes = []
    for _ in range(STEPS):
        schedule_s, step = seconds_of(lambda: scheduler.schedule(0.0))
        message_s, (size, step) = seconds_of(lambda step=step: over_the_wire(step, decoder))
        decoding += step.joining
        runner.admit(step)
        batch_s, _ = seconds_of(lambda step=step: runner.batches.of(step, runner.decoding))
        for name, spent_s in (("schedule", schedule_s), ("message", message_s), ("batch", batch_s)):
            seconds[name].append(spent_s)
        sizes.append(size)
        scheduler.complete(result(step, decoding))
    end_s, _ = seconds_of(lambda: scheduler.end(0))
    return {f"{name}_us": 1e6 * statistics.median(spent) for name, spent in seconds.items()} | {
        "message_bytes": statistics.median(sizes),
        "chunk_bytes": max(map(len, messages)),
        "kept_bytes": kept_bytes / len(lengths),
        "resident_mib": resident_bytes / 2**20,
        "end_us": 1e6 * end_s,
    }


def over_the_wire(step: Step, decoder: msgspec.msgpack.Decoder) -> tuple[int, Step]:
    message = msgspec.msgpack.encode(step)
    return len(message), decoder.decode(message)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, nargs="+", default=[10_000, 100_000, 1_000_000, 10_000_000])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    conditions = environment("")
    print(
        f"{conditions['cpu']}, {conditions['cores']} cores, torch {conditions['torch']}, commit "
        f"{conditions['commit']}, load averages before {conditions['load_average']}; {SHORT_REQUESTS} requests of "
        f"{SHORT_TOKENS} tokens beside the long one, chunks of {CHUNK_TOKENS} tokens, {STEPS} decode steps.\n"
    )
    print(f"| context | {' | '.join(COLUMNS.values())} |")
    print("|--:" * (1 + len(COLUMNS)) + "|")
    for tokens in arguments.tokens:
        row = measure(tokens)
        print(f"| {tokens:,} | {' | '.join(f'{row[name]:,.0f}' for name in COLUMNS)} |", flush=True)


if __name__ == "__main__":
    main()
