"""The answer to a question: frontiers, the best layout for the targets, and how the strategies compare."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longhelix.errors import UserError
from longhelix.perf.layouts import Mask
from longhelix.plan.apart import Apart, apart
from longhelix.plan.candidate import Candidate, candidates
from longhelix.plan.choice import Choice, Chooser
from longhelix.plan.latency import Latencies, latencies
from longhelix.plan.pareto import AtSpeed, Gain, at_least, frontier, gain
from longhelix.plan.question import Question
from longhelix.plan.service import Use
from longhelix.plan.space import HELIX, STRATEGIES, space
from longhelix.plan.sweep import Points, Sweep, full_sweep

TTL_BUDGETS_S = (0.005, 0.01, 0.02, 0.05, 0.1)


@dataclass(frozen=True)
class UsersAtTtl:
    """The most requests that a strategy serves within a TTL, and in which layout; None where it serves none."""

    ttl_s: float
    strategy: str
    most: Candidate | None


@dataclass(frozen=True)
class Plan:
    """frontier: of all strategies together; baseline: of all but Helix; strategies: of each one, by name. These are of
    decodes alone, as papers compare them.

    best: what meets all targets together, None where nothing does; nearest: what misses them by least, where nothing
    does. apart: with prefill and decode on instances of their own, None where nothing meets the targets so, or where
    requests do not end. headline: Helix over the baseline, None where one is empty. at_ttl: both at the TTL that the
    question sets, None where it sets none. latencies: TTFT against TBT, where it sets a TTFT.
    """

    question: Question
    configurations: int
    sweep: Sweep
    frontier: list[Candidate]
    baseline: list[Candidate]
    strategies: dict[str, list[Candidate]]
    headline: Gain | None
    at_ttl: AtSpeed | None
    best: Choice | None
    nearest: list[Choice]
    apart: Apart | None
    users_at_ttl: list[UsersAtTtl]
    latencies: Latencies | None


def answer(question: Question) -> Plan:
    """Search every layout; raises UserError where no configuration fits in memory."""
    budgets_s = (question.ttl_s,) if question.ttl_s is not None else TTL_BUDGETS_S
    every = space(question.setting.model, question.max_gpus, question.node_gpus)
    use = Use(question.setting, question.context, question.demand, question.ttft_s)
    searched = full_sweep(use, every, budgets_s)
    points = searched.points
    if not len(points):
        raise UserError(_nothing_fits(question, searched), "out_of_memory")
    strategy = searched.space.strategy[points.layout]
    helix = np.isin(strategy, [index for index, each in enumerate(STRATEGIES) if each.name in HELIX])
    chooser = Chooser(question, every)
    best = chooser.best() if question.has_targets else _balanced(chooser, points)
    return Plan(
        question=question,
        configurations=searched.configurations,
        sweep=searched,
        frontier=_frontier(searched, np.ones(len(points), dtype=np.bool_)),
        baseline=_frontier(searched, ~helix),
        strategies={each.name: _frontier(searched, strategy == index) for index, each in enumerate(STRATEGIES)},
        headline=_headline(points, helix),
        at_ttl=None if question.ttl_s is None else _at_ttl(points, helix, question.ttl_s),
        best=best,
        apart=apart(question, every),
        nearest=[] if best is not None else chooser.nearest(),
        users_at_ttl=_users_at_ttl(budgets_s, searched, strategy),
        latencies=None if question.ttft_s is None else latencies(use, every, question.users),
    )


def _frontier(searched: Sweep, mask: Mask) -> list[Candidate]:
    chosen = searched.points.take(mask)
    return candidates(searched.space, chosen.take(frontier(chosen.user_tokens_per_s, chosen.gpu_tokens_per_s)))


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
    """Without a target: the largest product of tokens/s/user and tokens/s/GPU, of what fits beside a chunk as well."""
    order = np.argsort(-points.user_tokens_per_s * points.gpu_tokens_per_s, kind="stable")
    choices = (chooser.at(int(points.layout[best]), float(points.batch[best])) for best in order)
    return next((choice for choice in choices if choice is not None), None)


def _users_at_ttl(
    budgets_s: Sequence[float], searched: Sweep, strategy: np.ndarray[tuple[int], np.dtype[np.intp]]
) -> list[UsersAtTtl]:
    """The paper's batch scalability: for each budget and strategy the most requests at a time."""
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
    short = float(searched.short_bytes.min()) / 1e9
    return (
        f"one request of {question.context} tokens does not fit on up to {question.max_gpus} GPUs: the best layout "
        f"lacks {short:.2f} GB on every GPU; raise --max-gpus, or choose a narrower --kv-dtype or --weight-dtype"
    )
