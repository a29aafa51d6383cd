"""The answer to a question: frontiers, the best layout for the targets, and how the strategies compare."""

from dataclasses import dataclass

import numpy as np

from longhelix.errors import UserError
from longhelix.perf.layouts import Mask
from longhelix.plan.candidate import Candidate, candidates
from longhelix.plan.latency import Latencies, latencies
from longhelix.plan.pareto import Gain, frontier, gain
from longhelix.plan.question import Question
from longhelix.plan.space import HELIX, STRATEGIES, space
from longhelix.plan.sweep import Points, Sweep, sweep

TTL_BUDGETS_S = (0.005, 0.01, 0.02, 0.05, 0.1)


@dataclass(frozen=True)
class UsersAtTtl:
    """The most requests that a strategy serves within a TTL, and in which layout; None where it serves none."""

    ttl_s: float
    strategy: str
    most: Candidate | None


@dataclass(frozen=True)
class Plan:
    """frontier: of all strategies together; baseline: of all but Helix; strategies: of each one, by name.

    best: what meets the targets, None where nothing does. headline: Helix over the baseline, None where one is empty.
    latencies: TTFT against TBT, where the question sets both.
    """

    question: Question
    configurations: int
    sweep: Sweep
    frontier: list[Candidate]
    baseline: list[Candidate]
    strategies: dict[str, list[Candidate]]
    headline: Gain | None
    best: Candidate | None
    users_at_ttl: list[UsersAtTtl]
    latencies: Latencies | None


def answer(question: Question) -> Plan:
    """Search every layout; raises UserError where no configuration fits in memory."""
    searched = sweep(question.setting, space(question.setting.model, question.max_gpus), question.context)
    points = searched.points
    if not len(points):
        raise UserError(_nothing_fits(question, searched), "out_of_memory")
    strategy = searched.space.strategy[points.layout]
    helix = np.isin(strategy, [index for index, each in enumerate(STRATEGIES) if each.name in HELIX])
    first_tokens = None
    meets = np.ones(len(points), dtype=np.bool_)
    if question.ttft_s is not None:
        first_tokens = latencies(question, searched.space)
        meets = first_tokens.best_s(question.ttl_s)[points.layout] <= question.ttft_s
    best = _best(question, searched, points, meets)
    return Plan(
        question=question,
        configurations=searched.configurations,
        sweep=searched,
        frontier=_frontier(searched, np.ones(len(points), dtype=np.bool_)),
        baseline=_frontier(searched, ~helix),
        strategies={each.name: _frontier(searched, strategy == index) for index, each in enumerate(STRATEGIES)},
        headline=_headline(points, helix),
        best=best,
        users_at_ttl=_users_at_ttl(question, searched, strategy),
        latencies=first_tokens,
    )


def _frontier(searched: Sweep, mask: Mask) -> list[Candidate]:
    chosen = searched.points.take(mask)
    return candidates(searched.space, chosen.take(frontier(chosen.user_tokens_per_s, chosen.gpu_tokens_per_s)))


def _headline(points: Points, helix: Mask) -> Gain | None:
    if helix.all() or not helix.any():
        return None
    ours, others = points.take(helix), points.take(~helix)
    return gain(ours.user_tokens_per_s, ours.gpu_tokens_per_s, others.user_tokens_per_s, others.gpu_tokens_per_s)


def _best(question: Question, searched: Sweep, points: Points, meets: Mask) -> Candidate | None:
    """Of what meets the targets the most tokens/s/GPU, or the fewest GPUs; without a target a balance of both."""
    meets = meets & (points.batch >= question.users)
    if question.ttl_s is not None:
        meets = meets & (points.ttl_s <= question.ttl_s)
    if not meets.any():
        return None
    chosen = points.take(meets)
    if question.fewest_gpus:
        order = np.lexsort((-chosen.user_tokens_per_s, chosen.gpus))
    elif question.ttl_s is None and question.ttft_s is None:
        order = np.argsort(-chosen.user_tokens_per_s * chosen.gpu_tokens_per_s, kind="stable")
    else:
        order = np.lexsort((-chosen.user_tokens_per_s, -chosen.gpu_tokens_per_s))
    return candidates(searched.space, chosen.take(order[:1]))[0]


def _users_at_ttl(
    question: Question, searched: Sweep, strategy: np.ndarray[tuple[int], np.dtype[np.intp]]
) -> list[UsersAtTtl]:
    """The paper's batch scalability: for each budget and strategy the most requests at a time."""
    points, found = searched.points, []
    budgets_s = (question.ttl_s,) if question.ttl_s is not None else TTL_BUDGETS_S
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
