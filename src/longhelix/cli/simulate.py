"""`longhelix simulate`: runs the engine's loop and scheduler on a workload, with predicted step times."""

import json as json_module
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.progress import Progress

from longhelix.cli.options import SimulateFlags, given, stderr
from longhelix.cli.planning import PlannedModel, make_folder, stdout
from longhelix.cli.values import Flag, Size, parse_size, tied_layout
from longhelix.cli.workload import WorkloadOptions
from longhelix.engine.options import EngineOptions
from longhelix.engine.settings.scheduler import scheduler_config
from longhelix.errors import UserError
from longhelix.perf.setting import Setting
from longhelix.perf.stages import balanced
from longhelix.plan.positions import beyond_positions
from longhelix.scheduler.kv.placement import PLACEMENTS
from longhelix.scheduler.policy import POLICIES
from longhelix.scheduler.request import MOST_TOKENS
from longhelix.simulate.arrival import Arrival, ScaledWorkload, Workload, rate_per_s
from longhelix.simulate.capacity import Capacity, find_capacity
from longhelix.simulate.chrome_trace import ChromeTrace
from longhelix.simulate.pool import with_pools
from longhelix.simulate.report import Variant, VariantResult, as_json, headline, table
from longhelix.simulate.simulation import Observer, Outcome, Server
from longhelix.simulate.simulation import simulate as simulate_workload
from longhelix.spec.layout import Layout
from longhelix.values import one_of


def simulate(
    model: PlannedModel,
    workload: WorkloadOptions = WorkloadOptions(),  # noqa: B008 - frozen
    engine: SimulateFlags = SimulateFlags(),  # noqa: B008 - frozen
    *,
    kvp: int = 1,
    tpa: int = 1,
    tpf: int | None = None,
    ep: int = 1,
    pp: int = 1,
    tied: Flag = False,
    hop_b: bool = True,
    policy: str = "fcfs",
    chunk_tokens: str = "auto",
    placement: str | None = None,
    kv_cache_tokens: Annotated[Size | None, Parameter(show_default=False)] = None,
    capacity: Flag = False,
    out: Path | None = None,
    chrome_trace: Path | None = None,
    json: Flag = False,
) -> None:
    """Simulate serving a workload. The engine's own loop and scheduler run, and the performance model predicts the time
    of each step.

    Parameters
    ----------
    kvp
        KV parallelism: GPUs that split each request's KV cache along the sequence.
    tpa
        Tensor parallelism of attention: GPUs that split the heads.
    tpf
        Tensor parallelism of the FFN: GPUs that split its columns. [default: kvp * tpa / ep]
    ep
        Expert parallelism: GPUs that split the experts.
    pp
        Number of pipeline stages.
    tied
        Replicate the FFN on every KVP instance, with tpf = tpa (Medha's layout).
    hop_b
        Overlap the exchange of partial attention results with attention (HOP-B).
    policy
        Scheduling policy: fcfs, edf, srpt or lars. Separate several by commas to compare them.
    chunk_tokens
        Maximum number of prompt tokens per step, or auto for the largest number within the TBT target. Separate
        several by commas to compare them.
    placement
        How a request's KV blocks are spread over KVP ranks: striped, growing, local or auto. Separate several by commas
        to compare them. [default: striped; auto if --kvp-threshold is set]
    kv_cache_tokens
        Capacity of the KV cache in tokens, over all KVP ranks. [default: all memory that weights and one step leave]
    capacity
        Also find the highest request rate at which 99% of the requests meet their service level.
    out
        Folder to write simulation.json and simulation.html to. The page works offline.
    chrome_trace
        File to write a timeline of steps and requests to, for chrome://tracing or ui.perfetto.dev. Allowed only if one
        variant is simulated.
    json
        Print one JSON object instead of tables.
    """
    setting = model.setting()
    layout = (
        tied_layout(kvp, tpa=tpa, tpf=tpf, ep=ep, pp=pp) if tied else Layout(kvp=kvp, tpa=tpa, tpf=tpf, ep=ep, pp=pp)
    )
    setting.model.check(layout)
    layout = balanced(setting, layout)
    options = EngineOptions(**given(engine), kv_cache_tokens=kv_cache_tokens)
    arrivals = workload.load()
    placement = placement or ("striped" if options.kvp_threshold_tokens is None else "auto")
    if options.kvp_threshold_tokens is not None and "auto" not in placement.split(","):
        raise UserError("--kvp-threshold applies only to --placement auto: leave it out, or set --placement auto")
    if capacity and not any(arrival.service.has_slo for arrival in arrivals):
        raise UserError(
            "--capacity is the highest rate that meets an SLO, but no request has one: set --ttft-slo or --tbt-slo"
        )
    variants = _variants(policy, chunk_tokens, placement)
    if chrome_trace is not None and len(variants) > 1:
        raise UserError(
            f"--chrome-trace records one variant, but {len(variants)} are compared: leave it out, or give one value "
            "each for --policy, --chunk-tokens and --placement"
        )
    if out is not None:
        make_folder(out)
    servers = [_server(setting, layout=layout, options=options, variant=variant, hop_b=hop_b) for variant in variants]
    observer = None if chrome_trace is None else ChromeTrace(chrome_trace)
    runs = [
        _run(variant, server=server, workload=arrivals, observer=observer, with_capacity=capacity)
        for variant, server in zip(variants, servers, strict=True)
    ]
    if observer is not None:
        observer.close()
    _warn(runs)
    warned = beyond_positions(setting.model, max(each.prompt_tokens + each.output_tokens for each in arrivals))
    if warned is not None:
        warnings.warn(warned, stacklevel=2)
    arrival_rps = rate_per_s(arrivals)
    if out is not None:
        title = f"{model.model} on {setting.system.name}, {layout.world_size} GPUs"
        _write(out, runs, title, f"{len(arrivals):,} requests, {arrival_rps:.3g} per second")
    if json:
        print(json_module.dumps(as_json(runs)))
    else:
        stdout().print(headline(runs, arrival_rps), highlight=False, style="bold", soft_wrap=True)
        stdout().print(table(runs))


def _write(folder: Path, runs: Sequence[VariantResult], title: str, about: str) -> None:
    """Write the page and the JSON file. Only this function imports plotly."""
    from longhelix.simulate.page import write_page

    write_page(folder / "simulation.html", runs, title, about)
    (folder / "simulation.json").write_text(json_module.dumps(as_json(runs), indent=1) + "\n")
    print(f"wrote simulation.html and simulation.json to {folder}", file=sys.stderr)


def _variants(policies: str, chunks: str, placements: str) -> list[Variant]:
    """Return all combinations of the comma-separated values."""
    policies_known = [one_of("policy", name.strip(), POLICIES) for name in policies.split(",")]
    sizes = [_chunk_tokens(text.strip()) for text in chunks.split(",")]
    placements_known = [one_of("placement", name.strip(), (*PLACEMENTS, "auto")) for name in placements.split(",")]
    return [Variant(*each) for each in product(policies_known, sizes, placements_known)]


def _chunk_tokens(text: str) -> int | None:
    """Parse a size; `auto` gives None."""
    if text == "auto":
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise UserError(f"--chunk-tokens: {error}") from error


def _server(setting: Setting, layout: Layout, options: EngineOptions, variant: Variant, hop_b: bool) -> Server:
    options = replace(
        options,
        policy=variant.policy,
        chunk_tokens="auto" if variant.chunk_tokens is None else variant.chunk_tokens,
        placement=variant.placement,
        kvp_threshold_tokens=options.kvp_threshold_tokens if variant.placement == "auto" else None,
    )
    config = scheduler_config(options, layout, MOST_TOKENS, setting)
    config = with_pools(setting, layout, config, asked_tokens=options.kv_cache_tokens)
    return Server(setting, layout, config, hop_b)


@dataclass(frozen=True)
class _WithProgress:
    """Workload that updates a progress bar while the simulation reads its requests."""

    workload: Workload
    progress: Progress

    def __len__(self) -> int:
        return len(self.workload)

    def __iter__(self) -> Iterator[Arrival]:
        task = self.progress.add_task("arrived", total=len(self.workload))
        every = max(len(self.workload) // 200, 1)
        for number, arrival in enumerate(self.workload):
            if number % every == 0:
                self.progress.update(task, completed=number)
            yield arrival
        self.progress.remove_task(task)


def _run(
    variant: Variant, server: Server, workload: Workload, observer: Observer | None, with_capacity: bool
) -> VariantResult:
    with Progress(console=stderr, transient=True) as progress:

        def simulated(requests: Workload, observer: Observer | None = None) -> Outcome:
            return simulate_workload(server, _WithProgress(requests, progress), observer)

        start_s = time.perf_counter()
        outcome = simulated(workload, observer)
        wall_s = time.perf_counter() - start_s
        return VariantResult(variant, outcome, wall_s, _capacity(simulated, workload) if with_capacity else None)


def _capacity(simulated: Callable[[Workload], Outcome], workload: Workload) -> Capacity:
    """Find the highest sustained request rate by scaling the time between arrivals."""
    rate_rps = rate_per_s(workload)
    if not rate_rps:
        raise UserError(
            "--capacity needs an arrival rate, but all requests arrive at once: give a workload with later arrivals"
        )
    return find_capacity(lambda rate: simulated(ScaledWorkload(workload, rate / rate_rps)).slo_attainment, rate_rps)


def _warn(runs: Sequence[VariantResult]) -> None:
    """Warn about requests that can never run, once, for the first variant with such requests."""
    refusing = next((run.outcome for run in runs if run.outcome.refused), None)
    if refusing is not None:
        warnings.warn(
            f"{refusing.refused} of {refusing.requests} requests can never run. The first one: {refusing.refusal}",
            stacklevel=3,
        )
