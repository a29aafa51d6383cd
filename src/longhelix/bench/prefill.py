"""Prefill: a whole prompt in chunks, as the engine runs it."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from longhelix.bench import memory
from longhelix.bench.clock import Clock
from longhelix.bench.decode import conditions
from longhelix.bench.formulas import prefill_flops
from longhelix.bench.measure import interleave, seconds
from longhelix.bench.model import RankModel, prefill_steps
from longhelix.bench.section import Column, Plot, Section
from longhelix.bench.world import Row, collect
from longhelix.runner.config import EngineConfig

COLUMNS = (
    Column("prompt", "prompt", ",d"),
    Column("chunk_tokens", "chunk", "d"),
    Column("weight_dtype", "weights"),
    Column("kv_dtype", "KV"),
    Column("layout", "kvp x tpa"),
    Column("threads", "threads", "d"),
    Column("execution", "layers"),
    Column("prefill_s", "prefill, s", ".3f"),
    Column("spread", "spread, %", ".0f", 100),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("flops_per_s", "GFLOP/s", ",.0f", 1e-9),
    Column("matmul_flops_per_s", "torch.mm, GFLOP/s", ",.0f", 1e-9),
    Column("mfu", "MFU", ".2f"),
    Column("attention_s", "attention, s", ".2f"),
    Column("products_s", "products, s", ".2f"),
    Column("collectives_s", "collectives, s", ".2f"),
    Column("outside_s", "overhead, s", ".2f"),
)
NOTE = (
    "A prompt of random tokens in chunks, first token sampled. GFLOP/s counts what causal attention needs, not what is "
    "computed. MFU = GFLOP/s over torch.mm in the model's dtype (square matrices), in turn with the prefills, all "
    "ranks together. attention, products, collectives: inside native calls of each kind; overhead: outside of all "
    "native calls; means over all prefills."
)
WARM_UP = 1


class PrefillJob(msgspec.Struct, frozen=True, tag=True):
    """What every rank measures: the prefill of each prompt, whose length is given in tokens."""

    config: EngineConfig
    prompts: tuple[int, ...]
    repeats: int

    def measure(self, rank: int, directory: Path) -> Iterator[Row]:
        model = RankModel(self.config, rank, directory)
        for prompt in self.prompts:
            yield self._point(model, prompt)

    def _point(self, model: RankModel, prompt: int) -> Row:
        config, runner = self.config, model.runner(prompt)
        token_ids = tuple(torch.randint(config.spec.vocab_size, (prompt,)).tolist())
        taken_s: list[float] = []

        def prefill() -> None:
            steps = prefill_steps(model, len(taken_s), token_ids)
            taken_s.append(seconds(lambda: [runner.execute(step) for step in steps]))

        calls = {"prefill": prefill, "matmul": memory.multiplier(getattr(torch, config.dtype))}
        with Clock() as clock:
            timings = interleave(calls, self.repeats, WARM_UP)
        return {
            "prompt": prompt,
            "chunk_tokens": config.scheduler.chunk_tokens,
            **timings["prefill"].row("prefill_s"),
            **clock.parts(sum(taken_s), len(taken_s)),
            "matmul_flops_per_s": memory.MULTIPLIER_FLOPS / timings["matmul"].median_s,
        }


def section(jobs: Sequence[PrefillJob], on_point: Callable[[Row], None]) -> Section:
    """Run each job on ranks of its own."""
    rows = []
    for job in jobs:
        points = collect(job, job.config.layout.world_size, on_point)
        rows += [conditions(job.config) | combine(ranks, job.config) for ranks in points]
    plot = Plot(("tokens_per_s",), ("layout", "weight_dtype", "kv_dtype"), x="prompt")
    return Section("prefill", "Prefill", NOTE, COLUMNS, rows, plot)


def combine(ranks: list[Row], config: EngineConfig) -> Row:
    """One row of all ranks': rank 0's times, everybody's arithmetic."""
    row = ranks[0] | {"matmul_flops_per_s": sum(row["matmul_flops_per_s"] for row in ranks)}
    flops_per_s = prefill_flops(config.spec, row["prompt"]) / row["prefill_s"]
    return row | {
        "tokens_per_s": row["prompt"] / row["prefill_s"],
        "flops_per_s": flops_per_s,
        "mfu": flops_per_s / row["matmul_flops_per_s"],
    }
