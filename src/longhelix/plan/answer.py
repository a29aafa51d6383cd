"""Answer a question with Pareto frontiers, the best layout for the targets, and a comparison of the strategies."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longhelix.errors import UserError
from longhelix.perf.layouts import Mask
from longhelix.plan.candidate import Candidate, candidates
from longhelix.plan.choice import Choice, Chooser
from longhelix.plan.disaggregated import Disaggregated, disaggregated
from longhelix.plan.latency import Latencies, latencies
from longhelix.plan.pareto import AtSpeed, Gain, at_least, frontier, gain
from longhelix.plan.question import Question
from longhelix.plan.service import ServiceLoad
from longhelix.plan.space import HELIX, STRATEGIES, space
from longhelix.plan.sweep import Points, Sweep, full_sweep
from longhelix.units import count, size

TTL_BUDGETS_S = (0.005, 0.01, 0.02, 0.05, 0.1)


@dataclass(frozen=True)
class UsersAtTtl:
    """The largest batch that a strategy serves within a TTL."""

    ttl_s: float
    strategy: str
    most: Candidate | None  # configuration with the largest batch; None if the strategy cannot serve a request


@dataclass(frozen=True)
class Plan:
    """The answer to a question. As in published comparisons, frontiers and gains cover decode only."""

    question: Question
    configurations: int  # number of evaluated configurations
    sweep: Sweep
    frontier: list[Candidate]  # frontier over all strategies
    baseline: list[Candidate]  # frontier over all strategies except Helix
    # Frontier of each strategy, by name. "helix_exposed" is left out if HOP-B gains nothing.
    strategies: dict[str, list[Candidate]]
    headline: Gain | None  # gain of Helix over the baseline; None if either frontier is empty
    at_ttl: AtSpeed | None  # Helix and the baseline at the TTL target; None without a TTL target
    best: Choice | None  # best choice that meets all targets; None if no configuration does
    nearest: list[Choice]  # choices closest to the targets; empty if `best` is set
    disaggregated: Disaggregated | None  # None if impossible, or without a demand
    users_at_ttl: list[UsersAtTtl]
    latencies: Latencies | None  # TTFT against TTL; None without a TTFT target

    @property
    def answer(self) -> Choice | None:
        """The best choice, or the choice closest to the targets if none meets all of them."""
        return self.best or next(iter(self.nearest), None)


def answer(question: Question) -> Plan:
    """Search all layouts for the answer to a question.

    Raises:
        UserError: no configuration fits in memory.
    """
    budgets_s = (question.ttl_s,) if question.ttl_s is not None else TTL_BUDGETS_S
    every = space(question.setting.model, question.max_gpus, question.node_gpus)
    use = ServiceLoad(question.setting, question.context, question.demand, question.ttft_s)
    searched = full_sweep(use, every, budgets_s)
    points = searched.points
    if not len(points):
        raise UserError(_nothing_fits(question, searched), "out_of_memory")
    strategy = searched.space.strategy[points.layout]
    helix = np.isin(strategy, [index for index, each in enumerate(STRATEGIES) if each.name in HELIX])
    chooser = Chooser(question, every)
    best = chooser.best() if question.has_targets else _balanced(chooser, points)
    strategies = {each.name: _frontier(searched, strategy == index) for index, each in enumerate(STRATEGIES)}
    if _points(strategies["helix_exposed"]) == _points(strategies["helix"]):
        del strategies["helix_exposed"]  # HOP-B gains nothing, so that the two are the same
    return Plan(
        question=question,
        configurations=searched.configurations,
        sweep=searched,
        frontier=_frontier(searched, np.ones(len(points), dtype=np.bool_)),
        baseline=_frontier(searched, ~helix),
        strategies=strategies,
        headline=_headline(points, helix),
        at_ttl=None if question.ttl_s is None else _at_ttl(points, helix, question.ttl_s),
        best=best,
        disaggregated=disaggregated(question, every),
        nearest=[] if best is not None else chooser.nearest(),
        users_at_ttl=[each for each in _users_at_ttl(budgets_s, searched, strategy) if each.strategy in strategies],
        latencies=None if question.ttft_s is None else latencies(use, every, question.users),
    )


def _frontier(searched: Sweep, mask: Mask) -> list[Candidate]:
    chosen = searched.points.take(mask)
    return candidates(searched.space, chosen.take(frontier(chosen.user_tokens_per_s, chosen.gpu_tokens_per_s)))


def _points(found: list[Candidate]) -> list[tuple[dict[str, int | str], int, float]]:
    return [(each.layout, each.batch, each.tokens_per_s_per_user) for each in found]


def _headline(points: Points, helix: Mask) -> Gain | None:
    if helix.all() or not helix.any():
        return None
    ours, others = points.take(helix), points.take(~helix)
    return gain(ours.user_tokens_per_s, ours.gpu_tokens_per_s, others.user_tokens_per_s, others.gpu_tokens_per_s)


def _at_ttl(points: Points, helix: Mask, ttl_s: float) -> AtSpeed:
    within, wanted = points.ttl_s <= ttl_s, np.zeros(1)
    ours, others = (
        float(at_least(kept.user_tokens_per_s, kept.gpu_tokens_per_s, wanted)[0]) if len(kept) else 0.0
        for kept in (points.take(within & helix), points.take(within & ~helix))
    )
    return AtSpeed(1 / ttl_s, ours, others)


def _balanced(chooser: Chooser, points: Points) -> Choice | None:
    """Return the choice without targets: the largest tokens/s/user times tokens/s/GPU that leaves room for a chunk."""
    order = np.argsort(-points.user_tokens_per_s * points.gpu_tokens_per_s, kind="stable")
    choices = (chooser.at(int(points.layout[best]), float(points.batch[best])) for best in order)
    return next((choice for choice in choices if choice is not None), None)


def _users_at_ttl(
    budgets_s: Sequence[float], searched: Sweep, strategy: np.ndarray[tuple[int], np.dtype[np.intp]]
) -> list[UsersAtTtl]:
    """Return each strategy's largest batch within each TTL budget (the Helix paper calls this batch scalability)."""
    points, found = searched.points, []
    for budget_s in budgets_s:
        for index, each in enumerate(STRATEGIES):
            within = points.take((strategy == index) & (points.ttl_s <= budget_s))
            most = None
            if len(within):
                order = np.lexsort((within.ttl_s, within.gpus, -within.batch))
                most = candidates(searched.space, within.take(order[:1]))[0]
            found.append(UsersAtTtl(budget_s, each.name, most))
    return found


def _nothing_fits(question: Question, searched: Sweep) -> str:
    short_bytes = float(searched.short_bytes.min())
    gpus = "1 GPU" if question.max_gpus == 1 else f"up to {question.max_gpus} GPUs"
    return (
        f"one request of {count(question.context)} tokens does not fit on {gpus}: the best layout "
        f"lacks {size(short_bytes)} on every GPU; raise --max-gpus, or choose a narrower --kv-dtype or --weight-dtype"
    )
