"""Compares layouts on the same ranks: Helix, local placement, tensor parallelism and the tied layout."""

import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.runner import ModelRunner
from longhelix.measure.bench.section import Column, Section
from longhelix.measure.model import LongRequests, RankModel
from longhelix.measure.timing import interleave
from longhelix.measure.world import Row, collect
from longhelix.scheduler.loop import Loop
from longhelix.scheduler.request import Request, SamplingParams
from longhelix.scheduler.scheduler import Scheduler
from longhelix.scheduler.step import Step, StepResult
from longhelix.spec.layout import Layout

COLUMNS = (
    Column("requests", "requests", "d"),
    Column("context", "context, tokens", ",d"),
    Column("strategy", "strategy"),
    Column("layout", "kvp x tpa"),
    Column("step_s", "step, ms", ".2f", 1e3),
    Column("spread", "spread, %", ".0f", 100),
    Column("over_helix", "step vs Helix", ".2f"),
    Column("exchanged_bytes", "exchanged, KB", ",.1f", 1e-3),
    Column("prefill_s", "prefill, s", ".3f"),
    Column("prefill_over_helix", "prefill vs Helix", ".2f"),
)
LONGEST_PROMPT = 2048
NOTE = (
    "Several layouts use the same ranks and weights, and are measured in turn. step: time of one decode step of all "
    "requests, with random KV. exchanged: bytes that all ranks send in Helix's exchange during this step. prefill: "
    "time from the first chunk to the first token of the last request, with the scheduler. It is measured for "
    f"prompts of up to {LONGEST_PROMPT:,} tokens. vs Helix: time divided by the time of Helix. Values below 1 are "
    "faster. local: each KVP rank has separate requests. tied: each KVP rank has a copy of the FFN. TP: the ranks "
    "split the heads. If there are fewer KV heads than ranks, KV heads are replicated."
)


class LayoutsJob(msgspec.Struct, frozen=True):
    """Job of every rank: measures decode and prefill with each strategy in turn."""

    configs: dict[str, EngineConfig]  # by strategy, Helix first
    points: tuple[tuple[int, int], ...]  # number of requests, and tokens per request
    repeats: int  # number of measured steps, after a warm-up

    def measure(self, rank: int, directory: Path) -> Iterator[Row]:
        models = {name: RankModel.join(config, rank, directory) for name, config in self.configs.items()}
        for requests, context in self.points:
            yield from self._point(models, requests, context)

    def _point(self, models: dict[str, RankModel], requests: int, context: int) -> Iterator[Row]:
        batches = {name: LongRequests(model, *(context,) * requests) for name, model in models.items()}
        steps = interleave({name: batch.step for name, batch in batches.items()}, self.repeats)
        prefills = {}
        if context <= LONGEST_PROMPT:
            prompts = torch.randint(1000, (requests, context - 1)).tolist()
            calls = {name: _Prefill(model, prompts) for name, model in models.items()}
            prefills = interleave(calls, max(self.repeats // 4, 3), warm_up=1)
        for name, model in models.items():
            group = model.mesh.kvp
            before = group.exchanged_bytes
            batches[name].step()
            row = {
                "requests": requests,
                "context": context,
                "strategy": name,
                "layout": f"{model.config.layout.kvp} x {model.config.layout.tpa}",
                **steps[name].row("step_s"),
                "exchanged_bytes": group.exchanged_bytes - before,
                "over_helix": steps[name].median_s / steps["Helix"].median_s,
            }
            if prefills:
                row["prefill_s"] = prefills[name].median_s
                row["prefill_over_helix"] = prefills[name].median_s / prefills["Helix"].median_s
            yield row


class _Prefill:
    """Prefills prompts up to their first tokens. Each rank runs its own scheduler, and all make the same decisions."""

    def __init__(self, model: RankModel, prompts: list[list[int]]) -> None:
        self._config = model.config.scheduler
        self._prompts = prompts
        self._runner = _Immediate(model.runner(*(len(prompt) + 1 for prompt in prompts)))

    def __call__(self) -> None:
        steps = replace(self._config.steps, max_running=len(self._prompts))
        config = replace(self._config, num_blocks=self._runner.num_blocks, steps=steps)
        loop = Loop(Scheduler(config), self._runner, time.monotonic)
        for index, prompt in enumerate(self._prompts):
            loop.add(
                Request(
                    id=index,
                    prompt_token_ids=array("i", prompt),
                    sampling=SamplingParams(max_new_tokens=1),
                    stop_token_ids=frozenset(),
                    seed=0,
                    arrival_s=0.0,
                )
            )
        while loop.step() is not None:
            pass


class _Immediate:
    """Runner of this rank. It computes each step as soon as the step is submitted."""

    def __init__(self, runner: ModelRunner) -> None:
        self.num_blocks = runner.pool.num_blocks
        self._runner = runner
        self._results: list[StepResult] = []

    def submit(self, step: Step) -> None:
        result = self._runner.execute(step)
        self._results.append(msgspec.structs.replace(result, sampled=self._runner.next_tokens.last_sampled(step)))

    def collect(self, timeout_s: float) -> StepResult:
        return self._results.pop(0)


def strategies(ranks: int, configure: Callable[[Layout], EngineConfig]) -> dict[str, EngineConfig]:
    """Return the configurations of all strategies on `ranks` ranks, by name, with Helix first."""
    helix = configure(Layout(kvp=ranks))
    local = replace(helix.scheduler.placement, name="local")
    return {
        "Helix": helix,
        "local": replace(helix, scheduler=replace(helix.scheduler, placement=local)),
        "TP": configure(Layout(tpa=ranks)),
        "tied": configure(Layout(kvp=ranks, ffn_replicas=ranks)),
    }


def section(job: LayoutsJob, on_point: Callable[[Row], None]) -> Section:
    """Run the job in new rank processes. Returns the table."""
    ranks = next(iter(job.configs.values())).layout.world_size
    rows = []
    for found in collect(job, ranks, on_point):
        rows.append(found[0] | {"exchanged_bytes": sum(row["exchanged_bytes"] for row in found)})
    return Section(name="layouts", title=f"Layouts on {ranks} ranks", note=NOTE, columns=COLUMNS, rows=rows)
