"""Calibration's fit: the constants of a system with which predictions come nearest to what was measured on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from longhelix.perf import collectives
from longhelix.perf.collectives import RankGroups
from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.prefill import prefill_seconds
from longhelix.perf.setting import Setting
from longhelix.perf.step import decode_seconds
from longhelix.spec import HardwareSpec
from longhelix.spec.layout import Layout

REQUEST_CONSTANTS = ("memory_efficiency", "compute_efficiency", "attention_efficiency")
COLLECTIVE_CONSTANTS = ("collective_s", "scale_up.latency_s", "scale_up.bytes_per_s")
LINK_CONSTANTS = ("scale_out.latency_s", "scale_out.bytes_per_s")

_COSTS = {
    "all-reduce": collectives.all_reduce,
    "all-to-all": collectives.all_to_all,
    "all-gather": collectives.all_gather,
    "reduce-scatter": collectives.all_gather,
}
_MOST_ROUNDS = 40
_NUDGE = 1e-4
_CONVERGED = 1e-9


@dataclass(frozen=True)
class MeasuredRequest:
    """What was measured of one request: its prefill of `tokens` in chunks of `chunk`, or (None) one decode step.

    tokens: of the prompt, or of the KV that the step reads. seconds: what it took.
    """

    layout: Layout
    tokens: int
    chunk: int | None
    seconds: float


@dataclass(frozen=True)
class MeasuredCollective:
    """A collective that was measured, by name: over `ranks`, of a tensor of `size_bytes`; it took `seconds`."""

    name: str
    ranks: int
    size_bytes: int
    seconds: float


def request_seconds(setting: Setting, requests: Sequence[MeasuredRequest]) -> Array:
    """Predicted seconds of each request. Nothing overlaps: so the engine runs them."""
    layouts = Layouts.of([request.layout for request in requests], hop_b=False)
    tokens = np.array([request.tokens for request in requests], dtype=np.float64)
    chunks = np.array([request.chunk or 0 for request in requests], dtype=np.float64)
    step = chunks == 0
    seconds = np.empty(len(requests))
    seconds[step] = decode_seconds(setting, layouts.take(step), 1.0, tokens[step])
    seconds[~step] = prefill_seconds(setting, layouts.take(~step), tokens[~step], chunks[~step])
    return seconds


def collective_seconds(system: HardwareSpec, measured: Sequence[MeasuredCollective]) -> Array:
    """Predicted seconds of each collective."""
    sent = [
        _COSTS[collective.name](
            system,
            RankGroups(np.array([float(collective.ranks)]), np.ones(1)),
            np.array([float(collective.size_bytes)]),
        )
        for collective in measured
    ]
    return np.concatenate([cost.seconds for cost in sent])


def fit_requests(setting: Setting, requests: Sequence[MeasuredRequest]) -> HardwareSpec:
    """The setting's system with the fractions of its peaks that the requests reach."""
    return fit(
        setting.system,
        REQUEST_CONSTANTS,
        lambda system: request_seconds(replace(setting, system=system), requests),
        np.array([request.seconds for request in requests]),
        f"fitted: {len(requests)} decode steps and prefills",
    )


def fit_collectives(system: HardwareSpec, measured: Sequence[MeasuredCollective]) -> HardwareSpec:
    """The system with what collectives cost in it.

    Groups of one size tell the sum of collective_s and of the latencies alone: from these the latency is fitted, with
    collective_s as it was.
    """
    names: Sequence[str] = COLLECTIVE_CONSTANTS
    if len({collective.ranks for collective in measured}) == 1:
        names = names[1:]
        system = system.replaced(
            {"collective_s": system.fixed.collective_s}, "assumed: groups of one size tell nothing of it"
        )
    return fit(
        system,
        names,
        lambda tried: collective_seconds(tried, measured),
        np.array([collective.seconds for collective in measured]),
        f"fitted: {len(measured)} collectives",
    )


def fit_link(system: HardwareSpec, measured: Sequence[MeasuredCollective]) -> HardwareSpec:
    """The system with the constants of the link between hosts. Each host runs `scale_up.ranks` of the ranks."""
    return fit(
        system,
        LINK_CONSTANTS,
        lambda tried: collective_seconds(tried, measured),
        np.array([collective.seconds for collective in measured]),
        f"fitted: {len(measured)} collectives between hosts",
    )


def fit(
    system: HardwareSpec,
    names: Sequence[str],
    predict: Callable[[HardwareSpec], Array],
    measured_s: Array,
    source: str,
) -> HardwareSpec:
    """The system with the named constants, all above 0, that make `predict` of it meet `measured_s`.

    Least squares of the logarithms, so that a short time weighs as much as a long one, over the logarithms of the
    constants (Levenberg-Marquardt). A constant that no measurement depends on stays as it was; fractions stay below 1.
    """
    constants = system.constants
    most = np.array([0.0 if name.endswith("_efficiency") else np.inf for name in names])

    def with_constants(logs: Array) -> HardwareSpec:
        return system.replaced(dict(zip(names, np.exp(logs).tolist(), strict=True)), source)

    def errors_of(logs: Array) -> Array:
        return np.log(predict(with_constants(logs)) / measured_s)

    logs = np.log([constants[name] for name in names])
    errors, damping = errors_of(logs), 1e-2
    for _ in range(_MOST_ROUNDS):
        nudged = [errors_of(logs + _NUDGE * unit) for unit in np.eye(len(names))]
        slopes = (np.stack(nudged, axis=1) - errors[:, None]) / _NUDGE
        move = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(names)), -slopes.T @ errors)
        tried = np.minimum(logs + move, most)
        tried_errors = errors_of(tried)
        gained = errors @ errors - tried_errors @ tried_errors
        damping *= 0.25 if gained > 0 else 4.0
        if gained > 0:
            logs, errors = tried, tried_errors
        if 0 <= gained < _CONVERGED:
            break
    return with_constants(logs)
