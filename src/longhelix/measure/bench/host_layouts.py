"""Compares layouts whose ranks are on several hosts, with predictions.

The hosts are those that run the command, or two network namespaces of this machine, joined by links of given rates. The
strategies are those of the layouts benchmark, and also Helix with HOP-B and pipeline stages (SPP).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch.distributed as dist

from longhelix.compute.kernels import native
from longhelix.compute.runner.config import EngineConfig
from longhelix.measure.bench import layouts
from longhelix.measure.bench.section import Column, Section
from longhelix.measure.host_link import HostsLink, name_of
from longhelix.measure.hosts import MeasuringHosts
from longhelix.measure.model import LongRequests, RankModel
from longhelix.measure.timing import Timing
from longhelix.measure.world import Row, collect
from longhelix.perf.fit import fit
from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.setting import Dtypes, Setting
from longhelix.perf.step import decode_seconds, step_seconds
from longhelix.perf.step_cost import StepCost
from longhelix.scheduler.cut import Cut
from longhelix.scheduler.work import Work
from longhelix.spec import HardwareSpec
from longhelix.spec.layout import Layout

HOP_B = "Helix, HOP-B"
STEP_CONSTANTS = ("kernel_s", "collective_s")  # fitted to a few of the measured steps
_FITTED = ("Helix", "TP")  # strategies of these steps
_WARM_UP_ROUNDS = 1
_STEPS = 2  # measured steps of a strategy in each round, after one that is not measured
_TIMEOUT_S = 3600.0  # time limit for one point; the first includes loading the models

LINK_COLUMNS = (
    Column("link", "link"),
    Column("bytes_per_s", "achieved, Gbit/s", ".2f", 8e-9),
    Column("spread", "spread, %", ".0f", 100),
    Column("latency_s", "scale_out.latency_s, us", ",.0f", 1e6),
    Column("fitted_bytes_per_s", "scale_out.bytes_per_s, Gbit/s", ".2f", 8e-9),
)
SHAPED = "The two hosts are network namespaces of this machine, joined by virtual devices whose rate tc limits."
LINK_NOTE = (
    "achieved: rate at which a host sends in a large all-gather. scale_out: constants of the link for predictions, "
    "fitted to collectives of 2 KB to 512 KB."
)
COLUMNS = (
    Column("link", "link"),
    Column("requests", "requests", "d"),
    Column("context", "context, tokens", ",d"),
    Column("strategy", "strategy"),
    Column("layout", "kvp x tpa x pp"),
    Column("parts", "parts", "d"),
    Column("step_s", "step, ms", ".2f", 1e3),
    Column("spread", "spread, %", ".0f", 100),
    Column("over_helix", "step vs Helix", ".2f"),
    Column("network_bytes", "between hosts, KB", ",.1f", 1e-3),
    Column("use", "used for"),
    Column("predicted_s", "predicted, ms", ".2f", 1e3),
    Column("error", "error, %", "+.1f", 100),
)
NOTE = (
    "All strategies use the same ranks and weights, and run in turn: one step that is not measured, then "
    f"{_STEPS} steps. step: time per decode step of all requests, with random KV, without the scheduler. With pipeline "
    "stages, the requests run in as many micro-batches, and the stages work at the same time. between hosts: bytes "
    "that all ranks send to other hosts in a step. parts: number of parts in which HOP-B exchanges; the cost model "
    "chooses it, with the constants of the link. predicted: time that the performance model predicts. Its constants "
    "are fitted to decode steps and prefills on one rank and to collectives. The fixed costs of kernels that run op by "
    "op ({kernel_s:.1f} us) and of collectives ({collective_s:.0f} us) are fitted to the steps with `fit`. If the "
    "ranks of a stage are on one host, its layers run from tapes. Mean absolute error: {error:.1%} over {points} "
    "points with `test`."
)


class HostLayoutsJob(msgspec.Struct, frozen=True):
    """Job of every rank: measures decode steps with each strategy in turn, at each rate of the link."""

    configs: dict[str, EngineConfig]  # by strategy, all on the same hosts
    points: tuple[tuple[int, int], ...]  # number of requests, and tokens per request
    rates_mbit: tuple[float | None, ...]  # as in HostLinkJob
    parts: tuple[tuple[int, ...], ...]  # HOP-B's, for each rate and then each point
    repeats: int  # number of measured rounds, after a warm-up

    def measure(self, rank: int, directory: Path) -> Iterator[Row]:
        first = next(iter(self.configs.values()))
        native.set_num_threads(first.machines.threads_of(rank))
        link = HostsLink.join(first.machines.hosts, rank, directory, self.rates_mbit)
        models = {name: RankModel.join(config, rank, directory) for name, config in self.configs.items()}
        for index, (requests, context) in enumerate(self.points):
            batches = {name: LongRequests(model, *(context,) * requests) for name, model in models.items()}
            for rate_mbit, parts in zip(self.rates_mbit, self.parts, strict=True):
                link.limit(rate_mbit)
                dist.barrier()
                timings = self._timed(batches, parts[index])
                for name, model in models.items():
                    cut = parts[index] if name == HOP_B else 1
                    yield {
                        "link": name_of(rate_mbit),
                        "rate_mbit": rate_mbit,
                        "requests": requests,
                        "context": context,
                        "strategy": name,
                        "parts": cut,
                        **timings[name].row("step_s"),
                        "network_bytes": self._sent_bytes(model, batches[name], cut),
                    }

    def _timed(self, batches: dict[str, LongRequests], parts: int) -> dict[str, Timing]:
        samples_s: dict[str, list[float]] = {name: [] for name in batches}
        for round_number in range(_WARM_UP_ROUNDS + self.repeats):
            for name, batch in batches.items():
                cut = parts if name == HOP_B else 1
                batch.step(cut)  # fills the stages, and lets the threads of other collectives come to rest
                start_s = time.perf_counter()
                for _ in range(_STEPS):
                    batch.step(cut)
                took_s = (time.perf_counter() - start_s) / _STEPS
                batch.settle()
                if round_number >= _WARM_UP_ROUNDS:
                    samples_s[name].append(took_s)
        return {name: Timing.of(samples) for name, samples in samples_s.items()}

    def _sent_bytes(self, model: RankModel, batch: LongRequests, parts: int) -> int:
        before = model.mesh.network_bytes
        batch.step(parts)
        batch.settle()
        return model.mesh.network_bytes - before


def strategies(ranks: int, configure: Callable[[Layout], EngineConfig]) -> dict[str, EngineConfig]:
    """Return the configurations of all strategies, by name, with Helix first. `configure` places ranks on hosts."""
    found = layouts.strategies(ranks, configure)
    found = {"Helix": found.pop("Helix")} | {HOP_B: configure(Layout(kvp=ranks))} | found
    return found | {"SPP": configure(Layout(pp=ranks))}


def chosen_parts(
    config: EngineConfig, systems: Sequence[HardwareSpec], points: Sequence[tuple[int, int]]
) -> tuple[tuple[int, ...], ...]:
    """Return the numbers of parts that the engine chooses for HOP-B, for each system and then each point."""
    cuts = [Cut(_cost(config, system)) for system in systems]
    return tuple(tuple(cut.parts(Work.decode(*point)) for point in points) for cut in cuts)


def _cost(config: EngineConfig, system: HardwareSpec) -> StepCost:
    return StepCost(_setting(config, system), config.layout)


def _setting(config: EngineConfig, system: HardwareSpec) -> Setting:
    formats = config.formats
    return Setting(config.spec, system, Dtypes(formats.product_dtype, formats.kv_dtype, packed=True))


def predicted_seconds(
    configs: Mapping[str, EngineConfig], system: HardwareSpec, taped_kernel_s: float, row: Row
) -> float:
    """Predict the time of the step of a row.

    Args:
        configs: the configurations by strategy.
        system: the system of all ranks, with the fixed cost of kernels that run op by op.
        taped_kernel_s: fixed cost of kernels that run from tapes.
    """
    config = configs[row["strategy"]]
    stage = range(config.layout.num_ranks)
    if len(config.machines.hosts.parts(stage)) == 1:
        system = system.replaced({"kernel_s": taped_kernel_s}, "kernels on tapes")
    setting = _setting(config, system)
    shape = Layouts.of([config.layout], hop_b=row["strategy"] == HOP_B)
    requests, context = float(row["requests"]), float(row["context"])
    if config.scheduler.placement.name != "local":
        return float(decode_seconds(setting, shape, requests, context)[0])
    # Work counts the KV of the fullest rank, for which the others wait.
    fullest_tokens = np.ceil(requests / config.layout.kvp) * context
    work = Work.decode(requests, context)._replace(decode_kv_tokens=config.layout.kvp * fullest_tokens)
    return float(step_seconds(setting, shape, work)[0])


def _is_fitted(job: HostLayoutsJob, row: Row) -> bool:
    """Whether STEP_CONSTANTS are fitted to a row: two strategies at two points of the first link."""
    is_point = (row["requests"], row["context"]) in job.points[:2]
    return is_point and row["rate_mbit"] == job.rates_mbit[0] and row["strategy"] in _FITTED


def _fit(job: HostLayoutsJob, rows: Sequence[Row], system: HardwareSpec, taped_kernel_s: float) -> HardwareSpec:
    """Return the system with the fixed costs of steps over several hosts.

    A collective between other work waits for threads that sleep and for ranks that are late, so it takes longer than
    the collectives that `host_link` measures. Kernels that run op by op take longer than those on tapes.
    """

    def predict(tried: HardwareSpec) -> Array:
        return np.array([predicted_seconds(job.configs, tried, taped_kernel_s, row) for row in rows])

    started = system.replaced({"collective_s": system.network.scale_out.latency_s}, "guess")
    measured_s = np.array([row["step_s"] for row in rows])
    return fit(started, STEP_CONSTANTS, predict, measured_s, f"fitted: {len(rows)} steps of ranks on several hosts")


def sections(
    job: HostLayoutsJob,
    links: Sequence[Row],
    systems: Sequence[HardwareSpec],
    taped_kernel_s: float,
    on_point: Callable[[Row], None],
    hosts: MeasuringHosts | None = None,
) -> list[Section]:
    """Run the job in new rank processes. Returns the tables of the links and of the layouts.

    Args:
        links: the measured links, a row per rate.
        systems: the system of all ranks with the constants of each link, for layers that run op by op.
        taped_kernel_s: fixed cost of kernels that run from tapes.
        hosts: the hosts that run the ranks. None for network namespaces of this machine.
    """
    world_size = next(iter(job.configs.values())).layout.world_size
    rows = [
        ranks[0] | {"network_bytes": sum(each["network_bytes"] for each in ranks)}
        for ranks in collect(job, world_size, on_point, _TIMEOUT_S, hosts)
    ]
    fitted = [row for row in rows if _is_fitted(job, row)]
    system = _fit(job, fitted, systems[0], taped_kernel_s)
    constants = {name: system.constants[name] for name in STEP_CONSTANTS}
    by_rate = {
        rate_mbit: each.replaced(constants, system.sources[STEP_CONSTANTS[0]])
        for rate_mbit, each in zip(job.rates_mbit, systems, strict=True)
    }
    helix_s = 0.0
    for row in rows:
        layout = job.configs[row["strategy"]].layout
        helix_s = row["step_s"] if row["strategy"] == "Helix" else helix_s
        predicted_s = predicted_seconds(job.configs, by_rate[row["rate_mbit"]], taped_kernel_s, row)
        row["use"] = "fit" if _is_fitted(job, row) else "test"
        row |= {
            "layout": f"{layout.kvp} x {layout.tpa} x {layout.pp}",
            "over_helix": row["step_s"] / helix_s,
            "predicted_s": predicted_s,
            "error": predicted_s / row["step_s"] - 1,
        }
    errors = [abs(row["error"]) for row in rows if row["use"] == "test"]
    note = NOTE.format(
        **{name: 1e6 * value for name, value in constants.items()}, error=sum(errors) / len(errors), points=len(errors)
    )
    return [
        link_section(links),
        Section(
            name="layouts",
            title=f"Layouts on {world_size} ranks of several hosts",
            note=note,
            columns=COLUMNS,
            rows=rows,
        ),
    ]


def link_section(links: Sequence[Row]) -> Section:
    """Return the table of the measured links, a row per rate."""
    note = LINK_NOTE if links[0]["rate_mbit"] is None else f"{SHAPED} {LINK_NOTE}"
    return Section(name="links", title="Links between hosts", note=note, columns=LINK_COLUMNS, rows=links)
