"""Measures the prefill of a whole prompt in chunks, as in the engine."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from longhelix.compute.runner.config import EngineConfig
from longhelix.measure import memory
from longhelix.measure.clock import Clock
from longhelix.measure.decode import conditions
from longhelix.measure.formulas import prefill_flops
from longhelix.measure.hosts import MeasuringHosts
from longhelix.measure.model import RankModel, prefill_steps
from longhelix.measure.timing import interleave, seconds
from longhelix.measure.world import Row, collect

WARM_UP = 1


class PrefillJob(msgspec.Struct, frozen=True):
    """Job of every rank: measures the prefill of each prompt."""

    config: EngineConfig
    prompts: tuple[int, ...]  # lengths in tokens
    repeats: int  # number of measured prefills, after a warm-up

    def measure(self, rank: int, directory: Path) -> Iterator[Row]:
        model = RankModel.join(self.config, rank, directory)
        for prompt in self.prompts:
            yield self._point(model, prompt)

    def _point(self, model: RankModel, prompt: int) -> Row:
        config, runner = self.config, model.runner(prompt)
        token_ids = tuple(torch.randint(config.spec.vocabulary.size, (prompt,)).tolist())
        taken_s: list[float] = []

        def prefill() -> None:
            steps = prefill_steps(model, len(taken_s), token_ids)
            taken_s.append(seconds(lambda: [runner.execute(step) for step in steps]))

        calls = {"prefill": prefill, "matmul": memory.multiplier(getattr(torch, config.formats.dtype))}
        with Clock() as clock:
            timings = interleave(calls, self.repeats, WARM_UP)
        return {
            "prompt": prompt,
            "chunk_tokens": config.scheduler.steps.chunk_tokens,
            **timings["prefill"].row("prefill_s"),
            **clock.mean(sum(taken_s), len(taken_s)),
            "matmul_flops_per_s": memory.multiplier_flops() / timings["matmul"].median_s,
        }


def measure(
    jobs: Sequence[PrefillJob], on_point: Callable[[Row], None], hosts: MeasuringHosts | None = None
) -> list[Row]:
    """Run each job in new rank processes. Returns a row for each prompt of each job."""
    rows = []
    for job in jobs:
        points = collect(job, job.config.layout.world_size, on_point, hosts=hosts)
        rows += [conditions(job.config) | combine(ranks, job.config) for ranks in points]
    return rows


def combine(ranks: list[Row], config: EngineConfig) -> Row:
    """Combine the rows of all ranks into one row. It has the times of rank 0 and the FLOP/s of all ranks together."""
    row = ranks[0] | {"matmul_flops_per_s": sum(row["matmul_flops_per_s"] for row in ranks)}
    flops_per_s = prefill_flops(config.spec, row["prompt"]) / row["prefill_s"]
    return row | {
        "tokens_per_s": row["prompt"] / row["prefill_s"],
        "flops_per_s": flops_per_s,
        "mfu": flops_per_s / row["matmul_flops_per_s"],
    }
