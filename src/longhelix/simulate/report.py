"""Format the results of simulations as JSON and as a table for the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from longhelix.simulate.capacity import ATTAINMENT, Capacity
from longhelix.simulate.histogram import RELATIVE_ERROR, Histogram
from longhelix.simulate.request_tracker import TBT_PERCENT
from longhelix.simulate.simulation import Outcome
from longhelix.units import digits, duration

_PERCENTS = (50.0, 90.0, 99.0)


@dataclass(frozen=True)
class Variant:
    """A combination of the settings that simulations can compare."""

    policy: str  # scheduling policy
    chunk_tokens: int | None  # maximum number of prompt tokens per step; None selects the number automatically
    placement: str  # placement of KV

    @property
    def name(self) -> str:
        return f"{self.policy}, chunks {self.chunk_tokens or 'auto'}, {self.placement}"


@dataclass(frozen=True)
class VariantResult:
    """A simulated variant and its results."""

    variant: Variant
    outcome: Outcome
    wall_s: float  # seconds that the simulation itself took to run
    capacity: Capacity | None = None  # None if the run did not search for the capacity


def as_json(runs: Sequence[VariantResult]) -> dict[str, Any]:
    """Return the JSON document of `longhelix simulate --json`: the only run, or all runs under the key "compared"."""
    objects = [_object(run) for run in runs]
    return objects[0] if len(objects) == 1 else {"compared": objects}


def _object(run: VariantResult) -> dict[str, Any]:
    outcome = run.outcome
    found: dict[str, Any] = {
        "requests": outcome.requests,
        "finished": outcome.finished,
        "refused": outcome.refused,
        "duration_s": outcome.duration_s,
        "steps": outcome.steps,
        "ttft_s": _times(outcome.ttft),
        "tbt_s": _times(outcome.tbt),
        "head_of_line_wait_s": _times(outcome.wait),
        "percentile_relative_error": RELATIVE_ERROR,
        "tokens_per_s": outcome.tokens_per_s,
        "goodput_rps": outcome.goodput_rps,
        "slo_attainment": outcome.slo_attainment,
        "slo_tbt_percentile": TBT_PERCENT,
        "gpu_s": outcome.gpu_s,
        "policy": run.variant.policy,
        "chunk_tokens": run.variant.chunk_tokens or "auto",
        "placement": run.variant.placement,
        "wall_s": run.wall_s,
        "timeline": [sample._asdict() for sample in outcome.timeline],
    }
    if run.capacity is not None:
        capacity = run.capacity
        found["capacity"] = {
            "rate_rps": capacity.rate_rps,
            "is_bounded": capacity.is_bounded,
            "least_attainment": ATTAINMENT,
            "trials": [vars(trial) for trial in capacity.trials],
        }
    return found


def _times(histogram: Histogram) -> dict[str, float | None]:
    return percentiles(histogram) | {"max": histogram.most_s if histogram.count else None}


def percentiles(histogram: Histogram) -> dict[str, float | None]:
    return {
        f"p{percent:.0f}": value for percent, value in zip(_PERCENTS, histogram.percentiles(_PERCENTS), strict=True)
    }


def headline(runs: Sequence[VariantResult], rate_rps: float) -> str:
    """Return the answer in one sentence for each run: how the arrivals are served, or the capacity."""
    arrive = f"at {digits(rate_rps)} requests/s" if rate_rps else "all at once"
    return "\n".join(_sentence(run, arrive) for run in runs)


def _sentence(run: VariantResult, arrive: str) -> str:
    outcome = run.outcome
    if run.capacity is not None:
        return f"{run.variant.name}: {_capacity(run)} requests/s with {ATTAINMENT:.0%} within their SLO."
    if not outcome.finished:
        return f"{run.variant.name}: no request can run."
    ttft, tbt = (_middle_and_late(times) for times in (outcome.ttft, outcome.tbt))
    return (
        f"{run.variant.name}: {outcome.finished:,} requests that arrive {arrive} get their first token after {ttft}, "
        f"and further tokens every {tbt}."
    )


def _middle_and_late(histogram: Histogram) -> str:
    median, late = histogram.percentiles((50.0, 99.0))
    return "-" if median is None or late is None else f"{duration(median)} (p99 {duration(late)})"


def table(runs: Sequence[VariantResult]) -> Table:
    """Return a table with one column per run."""
    shown = Table(title="simulated", title_justify="left")
    shown.add_column("")
    for run in runs:
        shown.add_column(run.variant.name, justify="right")
    for name, cells in rows(runs):
        shown.add_row(name, *cells)
    return shown


def rows(runs: Sequence[VariantResult]) -> list[tuple[str, list[str]]]:
    """Return the rows of the table. Each row consists of a name and of one cell per run."""
    outcomes = [run.outcome for run in runs]
    times = {
        "TTFT": [outcome.ttft for outcome in outcomes],
        "TBT": [outcome.tbt for outcome in outcomes],
        "head-of-line wait": [outcome.wait for outcome in outcomes],
    }
    lines = [
        ("requests finished / all", [f"{outcome.finished:,} / {outcome.requests:,}" for outcome in outcomes]),
        ("duration, s", [f"{outcome.duration_s:,.1f}" for outcome in outcomes]),
        ("steps", [f"{outcome.steps:,}" for outcome in outcomes]),
    ]
    for name, histograms in times.items():
        cells = [" / ".join(map(_ms, percentiles(histogram).values())) for histogram in histograms]
        lines.append((f"{name} p50 / p90 / p99, ms", cells))
    lines += [
        ("tokens/s", [f"{outcome.tokens_per_s:,.1f}" for outcome in outcomes]),
        ("goodput, requests/s within SLO", [f"{outcome.goodput_rps:.4g}" for outcome in outcomes]),
        ("within SLO", [f"{outcome.slo_attainment:.1%}" for outcome in outcomes]),
        ("GPU-seconds", [f"{outcome.gpu_s:,.0f}" for outcome in outcomes]),
        ("max KVP ranks of a request", [_most_kvp(outcome) for outcome in outcomes]),
        ("simulated steps/s", [f"{run.outcome.steps / run.wall_s:,.0f}" for run in runs]),
    ]
    if runs[0].capacity is not None:
        lines.append((f"capacity, requests/s with {ATTAINMENT:.0%} within SLO", [_capacity(run) for run in runs]))
    return lines


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.4g}" if seconds < 10 else f"{1e3 * seconds:,.0f}"


def _most_kvp(outcome: Outcome) -> str:
    return str(max((sample.kvp_most for sample in outcome.timeline), default=0))


def _capacity(run: VariantResult) -> str:
    assert run.capacity is not None
    if run.capacity.rate_rps is None:
        return "none"
    return f"{'' if run.capacity.is_bounded else 'above '}{digits(run.capacity.rate_rps)}"
