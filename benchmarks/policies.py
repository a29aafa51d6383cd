"""Policies under rising load: short prompts beside few of 100K to 2M tokens, simulated. Writes a table and a plot.

Times are those of the performance model, so the same seed gives the same table on every machine.

    python benchmarks/policies.py [--requests 1000] [--seed 1] [--out benchmarks/policies.md]
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import msgspec
from matplotlib.figure import Figure

from longhelix.measure.bench.environment import environment
from longhelix.perf.setting import Dtypes, Setting
from longhelix.scheduler.config import SchedulerConfig, StepConfig
from longhelix.scheduler.policy import POLICIES
from longhelix.scheduler.prefill_times import PrefillTimes
from longhelix.scheduler.request import MOST_TOKENS, ServiceLevel
from longhelix.simulate.arrival import Arrival
from longhelix.simulate.capacity import find_capacity
from longhelix.simulate.histogram import Histogram
from longhelix.simulate.pool import with_pools
from longhelix.simulate.request_tracker import RequestRecord
from longhelix.simulate.simulation import Observer, Server, simulate
from longhelix.simulate.synthetic import Synthetic, parse_mix
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model, load_system

MODEL, SYSTEM, LAYOUT = "llama-3-8b", "h100", Layout(kvp=8, tpa=8)
MIX, LONG_TOKENS = "95%:chat,5%:100K-2M:100-500", 100_000
LEAST_TTFT_S, TTFT_SCALE, TBT_S = 1.0, 5.0, 0.1
MOST_CHUNK_TOKENS, MAX_RUNNING = 8192, 256
LOADS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
START_RPS = 0.5


@dataclass(frozen=True)
class Found:
    """What came of a policy at a rate. worst: the longest time to a first token, in the request's own SLO."""

    short_p99_s: float
    long_attainment: float
    attainment: float
    long_median_s: float
    worst: float


class RequestRecords(Observer):
    """Records of all requests by id, which is their position in the order of arrival."""

    def __init__(self) -> None:
        self.by_id: dict[int, RequestRecord] = {}

    def ended(self, id: int, record: RequestRecord) -> None:
        self.by_id[id] = record


class Study:
    """One drawn workload, at any rate, by any policy."""

    def __init__(self, requests: int, seed: int) -> None:
        self._drawn = Synthetic(requests, 1.0, parse_mix(MIX), seed=seed)
        setting = Setting(load_model(MODEL), load_system(SYSTEM), Dtypes("bfloat16", "bfloat16"))
        config = SchedulerConfig(
            kvp=LAYOUT.kvp,
            num_blocks=1,
            max_model_len=MOST_TOKENS,
            steps=StepConfig(MOST_CHUNK_TOKENS, adaptive=True, max_running=MAX_RUNNING),
        )
        self.server = Server(setting, LAYOUT, with_pools(setting, LAYOUT, config))
        self._times = PrefillTimes(self.server.cost, LAYOUT.kvp)

    @cached_property
    def arrivals(self) -> list[Arrival]:
        """At one request a second."""
        return [msgspec.structs.replace(arrival, service=self._level(arrival)) for arrival in self._drawn]

    def _level(self, arrival: Arrival) -> ServiceLevel:
        ttft_s = max(LEAST_TTFT_S, TTFT_SCALE * self._times.until(arrival.prompt_tokens, 0))
        return ServiceLevel(ttft_slo_s=ttft_s, tbt_slo_s=TBT_S)

    @property
    def prefill_s(self) -> float:
        """The machine's seconds for a request's prompt alone, on average."""
        return statistics.mean(self._times.until(arrival.prompt_tokens, 0) for arrival in self.arrivals)

    def run(self, policy: str, rate_rps: float) -> Found:
        seen, arrivals = RequestRecords(), [arrival.scaled(rate_rps) for arrival in self.arrivals]
        scheduler = self.server.scheduler
        scheduler = replace(scheduler, service=replace(scheduler.service, policy=policy))
        server = replace(self.server, scheduler=scheduler)
        outcome = simulate(server, arrivals, seen)
        assert outcome.finished == len(arrivals)
        short, long, worst, met = Histogram(), [], 0.0, []
        for id, arrival in enumerate(arrivals):
            record = seen.by_id[id]
            assert record.first_s is not None
            assert arrival.service.ttft_slo_s is not None
            ttft_s = record.first_s - arrival.arrival_s
            worst = max(worst, ttft_s / arrival.service.ttft_slo_s)
            if arrival.prompt_tokens < LONG_TOKENS:
                short.add(ttft_s)
            else:
                long.append(ttft_s)
                met.append(record.met)
        p99_s = short.percentile(99)
        assert p99_s is not None
        return Found(p99_s, statistics.mean(met), outcome.slo_attainment, statistics.median(long), worst)

    def held_rps(self, policy: str) -> float:
        """The highest rate at which 99% of the requests are within their SLO; 0 where it holds none."""
        return find_capacity(lambda rate_rps: self.run(policy, rate_rps).attainment, START_RPS).rate_rps or 0.0


def table(rows: dict[tuple[float, str], Found], held_rps: float) -> list[str]:
    lines = [
        "| rate, 1/s | of what lars holds | policy | short TTFT p99, s | long within SLO | all within SLO "
        "| long TTFT median, s | longest TTFT, in SLOs |",
        "|--:|--:|---|--:|--:|--:|--:|--:|",
    ]
    for (load, policy), found in rows.items():
        lines.append(
            f"| {load * held_rps:.2f} | {load:.2f} | {policy} | {found.short_p99_s:.2f} | {found.long_attainment:.0%} "
            f"| {found.attainment:.1%} | {found.long_median_s:.1f} | {found.worst:.2f} |"
        )
    return lines


def draw(rows: dict[tuple[float, str], Found], held_rps: float, path: Path) -> None:
    figure = Figure(figsize=(10, 4), layout="constrained")
    short, long = figure.subplots(1, 2)
    rates = [load * held_rps for load in LOADS]
    for policy in POLICIES:
        found = [rows[load, policy] for load in LOADS]
        short.plot(rates, [each.short_p99_s for each in found], marker="o", label=policy)
        long.plot(rates, [100 * each.long_attainment for each in found], marker="o", label=policy)
    short.set(yscale="log", ylabel="p99 of TTFT, s", title="prompts under 100K tokens")
    long.set(ylim=(0, 103), ylabel="within their SLO, %", title="prompts of 100K to 2M tokens")
    for axes in (short, long):
        axes.axvline(0.75 * held_rps, color="grey", linestyle=":")
        axes.set_xlabel("requests per second (dotted: 0.75 of what lars holds)")
        axes.legend()
    figure.savefig(path, dpi=110)


def about(study: Study, arguments: argparse.Namespace, conditions: dict[str, object], held: Sequence[str]) -> list[str]:
    pool_tokens = study.server.scheduler.num_blocks * 16 * LAYOUT.kvp
    return [
        "# Policies under rising load, simulated",
        "",
        f"`benchmarks/policies.py`, commit {conditions['commit']}, Python {conditions['python']}. {MODEL} in bfloat16",
        f"on {LAYOUT.world_size} {SYSTEM.upper()} (KVP {LAYOUT.kvp} x TPA {LAYOUT.tpa}, striped, a pool of",
        f"{pool_tokens / 1e6:.1f}M tokens, HOP-B by the cost model). {arguments.requests:,} requests, {MIX}, Poisson,",
        f"seed {arguments.seed}; a prompt alone takes {study.prefill_s:.2f} s on average. SLO: a first token within",
        f"{TTFT_SCALE:g} times the prompt's prefill alone, at least {LEAST_TTFT_S:g} s; {TBT_S * 1e3:g} ms between",
        f"tokens. Chunks adapt to 80 ms or twice the decodes alone, {MOST_CHUNK_TOKENS:,} tokens at most;",
        f"{MAX_RUNNING} requests run at most.",
        "",
        f"Highest rate at which 99% of all requests are within their SLO: {', '.join(held)}. So short a run",
        "holds more than could be held for ever: what waits at its end is served after it.",
        "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/policies.md"))
    arguments = parser.parse_args()
    conditions, study = environment(""), Study(arguments.requests, arguments.seed)
    held = {policy: study.held_rps(policy) for policy in POLICIES}
    held_rps = held["lars"]
    rows = {(load, policy): study.run(policy, load * held_rps) for load in LOADS for policy in POLICIES}
    said = [f"{policy} {rate:.2f}/s" if rate else f"{policy} none" for policy, rate in held.items()]
    text = "\n".join([*about(study, arguments, conditions, said), *table(rows, held_rps), ""])
    print(text)
    arguments.out.write_text(text)
    draw(rows, held_rps, arguments.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
