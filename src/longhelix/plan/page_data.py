"""What the planner's page shows: what each length, pair of dtypes and number of GPUs that one can set there allows.

A point is a layout with a batch, and what a step of it costs; a configuration is a point with a chunk size, and what it
gives those who use it. Which configurations meet targets, and which of these is best, the page finds itself.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.setting import Setting
from longhelix.perf.step import WAIT, decode_items
from longhelix.plan.answer import Plan
from longhelix.plan.candidate import degrees, in_words
from longhelix.plan.choice import Choice
from longhelix.plan.demand import Demand, Kind
from longhelix.plan.pareto import frontier
from longhelix.plan.question import Question
from longhelix.plan.service import CHUNKS, ServiceLoad, mixed_seconds, prompts
from longhelix.plan.space import STRATEGIES, Space
from longhelix.plan.sweep import MOST_BATCH, Points, Sweep, unit_sweep, units
from longhelix.spec import ModelSpec
from longhelix.spec.layout import HeadShape, Layout

# Of the lengths that are asked for.
LENGTHS = (1 / 16, 1 / 4, 1.0, 4.0)
# Of weights and of KV, beside those that are asked for: the first two that a system has arithmetic for.
DTYPES = (("fp4", "fp8"), ("fp8", "fp8"), ("bfloat16", "bfloat16"))
_MORE_DTYPES = 2
MOST_POINTS, MOST_ASKED_POINTS = 12, 24
MOST_DRAWN = 144
_COARSE, _FINE = 1, 4  # batches per octave
_QUICK_CHUNKS = (128.0, 8192.0)
_QUICK_OCTAVES = 2  # between batches of layouts that are there for their prefill
_SOME_CHUNKS = CHUNKS[1::3]
_MOST_LAYOUTS = 1000
_STAGE = ("dp", "kvp", "tpa", "tpf", "ep", "ffn_replicas")
_POINT = ("layout", "batch", "ttl_s")
_MEMORY = ("weights_bytes", "kv_bytes")
_COSTS = ("seconds", "flops", "hbm_bytes", "net_bytes")
_CONFIGURATION = ("point", "chunk", "activations_bytes", "ttl_p95_s", "longest_s")
_PROMPTS = ("busy_s", "wait_s", "step_s")
_OWNERS = ("kvp_rank", "tpa_rank", "tpf_rank", "ep_rank", "kv_heads", "query_heads", "merged_query_heads", "experts")
# Of float32's 23 bits of mantissa: 1 part in 4096, and half the bytes once compressed.
_KEPT_BITS = 11
_KINDS = {
    "attention": (
        *("attention", "RoPE and KV write", "merge"),
        *("indexer", "top-k", "top-k of all", "linear attention"),
    ),
    "exchange": ("exchange", "candidates"),
    "projections": (
        *("norms", "QKV", "key absorption", "value projection", "output projection"),
        *("indexer projections", "linear projections"),
    ),
    "FFN": ("router", "shared experts", "experts", "dense FFN"),
    "collectives": ("all-reduce after attention", "gather before FFN", "all-reduce after FFN", "stage to stage"),
    "other": ("embedding", "head", "sampling", "host", WAIT),
}
_Index = NDArray[np.intp]


@dataclass(frozen=True)
class PageData:
    """`document` is for JSON; `numbers` holds the matrices of its tables, one after the other."""

    document: dict[str, Any]
    numbers: NDArray[np.float32]


@dataclass(frozen=True)
class _Kept:
    """What is kept of a sweep. points: `layout` is that of the whole space; lines: positions among them of those on a
    frontier, by cap and strategy; short_bytes: what the nearest layout lacks for one request, by cap."""

    points: Points
    lines: list[list[list[int]]]
    short_bytes: list[float]
    configurations: int


@dataclass(frozen=True)
class _Table:
    """One length and pair of dtypes. A row of `points`, or of `configurations`, is a number of each of them."""

    kept: _Kept
    points: NDArray[np.float32]
    configurations: NDArray[np.float32]
    item_names: list[str]


def page_data(plan: Plan, model_name: str, answer: dict[str, Any]) -> PageData:
    """Of a plan, whose sweep gives the whole frontiers of what is asked for, and of what lies around it.

    answer: of the plan as JSON what another page compares with its own.
    """
    question, every = plan.question, plan.sweep.space
    settings, questions = _settings(question.setting), _questions(question)
    tables = _tables(plan, settings, questions)
    used = np.unique(np.concatenate([table.kept.points.layout for table in tables]))
    document = {
        "model": model_name,
        "system": question.setting.system.name,
        **_model(question.setting),
        **_choices(settings, questions),
        "asked": _asked(question, questions),
        "answer": answer,
        "looked_at": sum(table.kept.configurations for table in tables),
        "accepted_tokens": question.setting.accepted_tokens,
        "output_tokens": None if question.demand is None else question.demand.output_tokens,
        "strategies": [vars(strategy) for strategy in STRATEGIES],
        "layouts": [_layout(every, int(index)) for index in used],
        "owner_rows": _OWNERS,
        "owners": _owners(question.setting.model, every, used),
        "point_rows": [*_POINT, *_MEMORY],
        "item_rows": _COSTS,
        "items": [{"name": name, "kind": kind_of(name)} for name in tables[0].item_names],
        "configuration_rows": [*_CONFIGURATION, *(() if question.demand is None else _PROMPTS)],
        "tables": [_outline(table) for table in tables],
    }
    for table in tables:
        table.points[0] = np.searchsorted(used, table.kept.points.layout)
    matrices = [matrix for table in tables for matrix in (table.points, table.configurations)]
    return PageData(document, np.concatenate([matrix.ravel() for matrix in matrices]))


def gpu_caps(max_gpus: int) -> list[int]:
    """Powers of two below `max_gpus`, and that."""
    return [2**power for power in range(max_gpus.bit_length()) if 2**power < max_gpus] + [max_gpus]


def kind_of(item_name: str) -> str | None:
    """The kind of work that a cost item is, or None for one that this page does not know."""
    return next((kind for kind, names in _KINDS.items() if item_name in names), None)


def _model(setting: Setting) -> dict[str, Any]:
    model, system = setting.model, setting.system
    return {
        "capacity_bytes": system.usable_bytes,
        "shares_capacity": system.shared,
        "num_layers": model.num_layers,
        "num_experts": model.moe.num_experts if model.moe else 1,
        "latent": model.mla is not None,
    }


def _choices(settings: list[Setting], questions: list[Question]) -> dict[str, Any]:
    """What one can choose from."""
    return {
        "lengths": [each.context for each in questions],
        "dtypes": [[setting.weight_dtype, setting.kv_dtype] for setting in settings],
        "expert_dtypes": [setting.experts_in for setting in settings],
        "gpu_caps": gpu_caps(questions[0].max_gpus),
    }


def _asked(question: Question, questions: list[Question]) -> dict[str, Any]:
    """What the page opens with, beside the first dtypes and the most GPUs."""
    return {
        "length": questions.index(question),
        "ttl_s": question.ttl_s,
        "ttft_s": question.ttft_s,
        "users": question.users,
        "rate_per_s": question.rate_per_s,
        "gpu_hour": question.gpu_hour,
        "fewest_gpus": question.fewest_gpus,
    }


def _outline(table: _Table) -> dict[str, Any]:
    """A table without its numbers."""
    return {
        "points": table.points.shape[1],
        "configurations": table.configurations.shape[1],
        "frontiers": table.kept.lines,
        "short_bytes": table.kept.short_bytes,
    }


def _tables(plan: Plan, settings: list[Setting], questions: list[Question]) -> list[_Table]:
    """Of each pair of dtypes, and of these each length."""
    every, caps = plan.sweep.space, gpu_caps(plan.question.max_gpus)
    quick = _quickest(_use(plan.question.setting, plan.question), every, caps)
    tables = []
    for setting in settings:
        for question in questions:
            use = _use(setting, question)
            if setting is plan.question.setting and question is plan.question:
                tables.append(_asked_table(use, plan, caps, quick))
            else:
                tables.append(_table(use, _around(use, every, caps, quick), every, _SOME_CHUNKS))
    return tables


def _settings(asked: Setting) -> list[Setting]:
    """What is asked for, and other dtypes that the system has arithmetic for."""
    pairs = [pair for pair in DTYPES if pair != (asked.weight_dtype, asked.kv_dtype)]
    known = [pair for pair in pairs if all(dtype in asked.system.flops_per_s for dtype in pair)]
    return [asked, *(_in_dtypes(asked, weights, kv) for weights, kv in known[:_MORE_DTYPES])]


def _in_dtypes(asked: Setting, weights: str, kv: str) -> Setting:
    """Experts keep the dtype that is asked for them beside the weights that it is asked for."""
    experts = asked.expert_dtype if weights == asked.weight_dtype else None
    return replace(asked, weight_dtype=weights, kv_dtype=kv, expert_dtype=experts)


def _questions(asked: Question) -> list[Question]:
    """The same of shorter and longer requests; the prompts of a demand are, and its answers stay."""
    found = {each.context: each for each in (_scaled(asked, times) for times in LENGTHS)}
    return [question for _, question in sorted((found | {asked.context: asked}).items())]


def _scaled(asked: Question, times: float) -> Question:
    def tokens(count: int) -> int:
        return max(1, round(times * count))

    if asked.demand is None:
        return replace(asked, context=tokens(asked.context))
    kinds = (Kind(each.share, tokens(each.input_tokens), each.output_tokens) for each in asked.demand.kinds)
    demand = Demand(tuple(kinds), asked.demand.rate_per_s, asked.demand.prefix_hit)
    return replace(asked, context=demand.longest, demand=demand)


def _use(setting: Setting, question: Question) -> ServiceLoad:
    return ServiceLoad(setting, question.context, question.demand, question.ttft_s)


def _quickest(use: ServiceLoad, every: Space, caps: list[int]) -> _Index:
    """For each cap and strategy the layouts that prefill the longest prompt fastest, in small chunks and in large ones:
    decodes lead elsewhere."""
    layouts, found = every.layouts, []
    for chunk in _QUICK_CHUNKS:
        fits = use.memory_bytes(layouts, 1.0, chunk) <= use.setting.capacity_bytes(layouts)
        ttft_s = np.where(fits, prompts(use, layouts, chunk * layouts.ones).longest_s, np.inf)
        for cap in caps:
            for strategy in range(len(STRATEGIES)):
                allowed = np.where((layouts.world_size <= cap) & (every.strategy == strategy), ttft_s, np.inf)
                found += [int(allowed.argmin())] if np.isfinite(allowed).any() else []
    return np.unique(np.array(found, dtype=np.intp))


def _asked_table(use: ServiceLoad, plan: Plan, caps: list[int], quick: _Index) -> _Table:
    """Whole frontiers, and what the plan recommends or names as nearest among the points."""
    every = plan.sweep.space
    named = [*([] if plan.best is None else [plan.best]), *plan.nearest]
    kept = _kept(plan.sweep, np.arange(len(every)), caps, MOST_ASKED_POINTS, plan.question.ttl_s)
    more = [_at(use, every, choice) for choice in named]
    more.append(_quick_points(every, plan.sweep, np.arange(len(every)), quick))
    return _table(use, _with(kept, more), every, CHUNKS)


def _around(use: ServiceLoad, every: Space, caps: list[int], quick: _Index) -> _Kept:
    """Layouts that are on a frontier of few batches with more of them, and those that prefill fast with some."""
    some = np.arange(len(every)) if len(every) <= _MOST_LAYOUTS else _round(every)
    coarse = unit_sweep(use, _taken(every, some), _batches(_COARSE))
    rough = _kept(coarse, some, caps, None)
    chosen = np.union1d(rough.points.layout, quick)
    fine = unit_sweep(use, _taken(every, chosen), _batches(_FINE))
    kept = _kept(fine, chosen, caps, MOST_POINTS)
    counted = coarse.configurations + fine.configurations
    kept = replace(kept, short_bytes=rough.short_bytes, configurations=counted)
    return _with(kept, [_quick_points(every, fine, chosen, quick)])


def _taken(every: Space, index: _Index) -> Space:
    return Space(every.layouts.take(index), every.strategy[index])


def _round(every: Space) -> _Index:
    """Layouts whose stages, and whose ranks in a stage, are a power of two or three times one, or the most."""
    round_numbers = [times * 2.0**power for times in (1, 3) for power in range(12)]
    ranks, stages = every.layouts.num_ranks, every.layouts.pp
    return np.flatnonzero(np.isin(ranks, [*round_numbers, ranks.max()]) & np.isin(stages, round_numbers))


def _batches(per_octave: int) -> Array:
    return np.unique(np.round(2.0 ** np.arange(0, np.log2(MOST_BATCH) + 1, 1 / per_octave)))


def _quick_points(every: Space, found: Sweep, index: _Index, quick: _Index) -> Points:
    """Those layouts with 1, 4, 16 requests and so on; index: of the sweep's layouts in the whole space."""
    layout = index[found.points.layout]
    octave = np.log2(found.points.batch / units(every.layouts)[layout])
    points = found.points.take(np.isin(layout, quick) & (octave % _QUICK_OCTAVES == 0))
    return replace(points, layout=index[points.layout])


def _at(use: ServiceLoad, every: Space, choice: Choice) -> Points:
    """The layout and batch of a choice."""
    strategies = [strategy.name for strategy in STRATEGIES]
    alike = np.flatnonzero(every.strategy == strategies.index(choice.strategy))
    index = np.array([next(each for each in alike if degrees(every.layouts, int(each)) == choice.layout)])
    layouts, batch = every.layouts.take(index), np.array([float(choice.batch)])
    return Points(
        index, batch, layouts.world_size, use.token_seconds(layouts, batch), use.memory_bytes(layouts, batch, 0.0)
    )


def _kept(found: Sweep, index: _Index, caps: list[int], most: int | None, ttl_s: float | None = None) -> _Kept:
    """At most `most` points of each frontier, with the best that keeps the TTL; index: of the sweep's layouts in the
    whole space."""
    strategies = found.space.strategy[found.points.layout]
    lines = [
        list(_growing(found.points, np.flatnonzero(strategies == number), caps, most, ttl_s))
        for number in range(len(STRATEGIES))
    ]
    kept = np.unique(np.concatenate([line for of_caps in lines for line in of_caps]))
    points = found.points.take(kept)
    gpus = found.space.layouts.world_size
    return _Kept(
        replace(points, layout=index[points.layout]),
        [[np.searchsorted(kept, of_caps[cap]).tolist() for of_caps in lines] for cap in range(len(caps))],
        [float(found.short_bytes[gpus <= cap].min(initial=np.inf)) for cap in caps],
        found.configurations,
    )


def _growing(
    points: Points, members: _Index, caps: list[int], most: int | None, ttl_s: float | None
) -> Iterator[_Index]:
    """The frontier of the points that are `members` under each cap, made from the one before."""
    user, gpu, gpus = points.user_tokens_per_s, points.gpu_tokens_per_s, points.gpus[members]
    best, below = np.zeros(0, dtype=np.intp), 0
    for cap in caps:
        best = np.concatenate([best, members[(gpus > below) & (gpus <= cap)]])
        best = best[frontier(user[best], gpu[best])]
        below = cap
        yield best if most is None else best[_thinned(user[best], most, ttl_s)]


def _thinned(ascending: Array, most: int, ttl_s: float | None) -> _Index:
    """Positions of at most `most` numbers, evenly spread on a logarithmic axis, ends included, and of the first that
    keeps the TTL."""
    if len(ascending) <= most:
        return np.arange(len(ascending))
    wanted = np.geomspace(ascending[0], ascending[-1], most)
    kept = np.append(np.searchsorted(ascending[:-1], wanted[:-1]), len(ascending) - 1)
    asked = [] if ttl_s is None else [np.searchsorted(ascending[:-1], 1 / ttl_s)]
    return np.unique(np.append(kept, asked).astype(np.intp))


def _with(kept: _Kept, more: Iterable[Points]) -> _Kept:
    """The same with points that are on no frontier."""
    every = [kept.points, *more]
    names = ("layout", "batch", "gpus", "ttl_s", "memory_bytes")
    return replace(kept, points=Points(*(np.concatenate([getattr(each, name) for each in every]) for name in names)))


def _table(use: ServiceLoad, kept: _Kept, every: Space, chunks: tuple[int, ...]) -> _Table:
    points = kept.points
    layouts = every.layouts.take(points.layout)
    held = use.memory(layouts, points.batch, 0.0)
    # Of a token: a step gives several where drafts are accepted.
    share = 1 / use.setting.accepted_tokens
    items = [item.times(share) for item in decode_items(use.setting, layouts, points.batch, use.kv_tokens)]
    exact = np.array([points.layout, points.batch, points.ttl_s], dtype=np.float32)
    measured = [getattr(held, name) for name in _MEMORY]
    measured += [getattr(item, name) for name in _COSTS for item in items]
    rows = np.vstack([exact, _rounded(np.array(measured))])
    return _Table(kept, rows, _configurations(use, points, every, chunks), [item.name for item in items])


def _configurations(use: ServiceLoad, points: Points, every: Space, chunks: tuple[int, ...]) -> NDArray[np.float32]:
    """Of each point with each chunk size that fits beside it: (rows, configurations)."""
    point, chunk = np.repeat(np.arange(len(points)), len(chunks)), np.tile(np.array(chunks, dtype=float), len(points))
    layouts, batch = every.layouts.take(points.layout[point]), points.batch[point]
    held = use.memory(layouts, batch, chunk)
    fits = np.flatnonzero(held.total_bytes <= use.setting.capacity_bytes(layouts))
    point, chunk, batch, layouts = point[fits], chunk[fits], batch[fits], layouts.take(fits)
    decodes = use.decodes(layouts, batch)
    found = prompts(use, layouts, chunk, decodes)
    rows = [point, chunk, held.activations_bytes[fits], mixed_seconds(use, layouts, batch, chunk), found.longest_s]
    if use.demand is not None:
        step_s = layouts.pp * found.busy_s / found.chunks / use.setting.accepted_tokens
        rows += [found.busy_s, found.wait_s, step_s]
    return np.array(rows, dtype=np.float32).reshape(len(rows), -1)


def _rounded(numbers: Array) -> NDArray[np.float32]:
    """Float32 whose last bits are zero, so that it compresses."""
    dropped = np.uint32(23 - _KEPT_BITS)
    bits = numbers.astype(np.float32).view(np.uint32) + (np.uint32(1) << (dropped - np.uint32(1)))
    return (bits >> dropped << dropped).view(np.float32)


def _layout(every: Space, index: int) -> dict[str, Any]:
    found = degrees(every.layouts, index)
    return {
        **found,
        "words": in_words(found),
        "strategy": int(every.strategy[index]),
        "gpus": int(every.layouts.world_size[index]),
        "stage": _stage(every, index),
    }


def _stage(every: Space, index: int) -> str:
    """The degrees that say who owns what."""
    return " ".join(str(int(getattr(every.layouts, name)[index])) for name in _STAGE)


def _owners(model: ModelSpec, every: Space, used: _Index) -> dict[str, list[list[Any]]]:
    """What each rank of each stage that can be drawn owns, ranges as first and last; keys are the stage's degrees."""
    heads = HeadShape(model.num_query_heads, model.num_kv_heads)
    num_experts = model.moe.num_experts if model.moe else 1
    drawn = used[every.layouts.num_ranks[used] <= MOST_DRAWN]
    stages = {_stage(every, int(index)): every.layouts.take(np.array([index])) for index in drawn}
    return {stage: _stage_owners(layouts, heads, num_experts) for stage, layouts in stages.items()}


def _stage_owners(layouts: Layouts, heads: HeadShape, num_experts: int) -> list[list[Any]]:
    dp, kvp, tpa, tpf, ep, ffn_replicas = (int(getattr(layouts, name)[0]) for name in _STAGE)
    layout, group = Layout(dp * kvp, tpa, tpf, ep, ffn_replicas=ffn_replicas), Layout(kvp, tpa)
    return [
        [
            layout.kvp_rank(rank),
            layout.tpa_rank(rank),
            layout.tpf_rank(rank),
            layout.ep_rank(rank),
            *(
                [owned.start, owned.stop - 1]
                for owned in (
                    layout.kv_heads(heads, rank),
                    layout.query_heads(heads, rank),
                    group.merged_query_heads(heads, rank % group.num_ranks),
                    layout.experts(num_experts, rank),
                )
            ),
        ]
        for rank in range(layout.num_ranks)
    ]
