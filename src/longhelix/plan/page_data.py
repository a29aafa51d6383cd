"""Data of the planner's page: the best configurations for each length, pair of dtypes and number of GPUs.

A point is a layout with a batch size and the cost of a step. A configuration is a point with a chunk size and the
resulting service. The page itself finds the configurations that meet the targets and selects the best one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.setting import Dtypes, Setting
from longhelix.perf.step import WAIT, decode_items
from longhelix.plan.answer import Plan
from longhelix.plan.candidate import degrees, in_words
from longhelix.plan.choice import LITTLE_LESS, LITTLE_MORE, Choice
from longhelix.plan.demand import Demand, Kind
from longhelix.plan.pareto import frontier
from longhelix.plan.question import LEAST_CHUNK, Question
from longhelix.plan.service import CHUNKS, ServiceLoad, mixed_seconds, prompts
from longhelix.plan.space import STRATEGIES, Space
from longhelix.plan.sweep import MOST_BATCH, Points, Sweep, unit_sweep, units
from longhelix.spec import ModelSpec
from longhelix.spec.layout import HeadShape, Layout

# Request lengths on the page, relative to the lengths of the plan.
LENGTHS = (1 / 16, 1 / 4, 1.0, 4.0)
# Additional pairs of weight and KV dtypes on the page: the first _MORE_DTYPES pairs that the system can compute in.
DTYPES = (("fp4", "fp8"), ("fp8", "fp8"), ("bfloat16", "bfloat16"))
_MORE_DTYPES = 2
MOST_POINTS, MOST_PLAN_POINTS = 12, 24  # maximum points per frontier: in other tables, in the plan's table
MOST_DRAWN = 144  # maximum number of ranks of a stage that the page draws
_COARSE, _FINE = 1, 4  # batch sizes per octave
_PREFILL_CHUNKS = (128.0, 8192.0)
_PREFILL_OCTAVES = 2  # octaves between batch sizes of layouts selected for their fast prefill
_SOME_CHUNKS = CHUNKS[1::3]  # chunk sizes of all tables except the plan's table
_MOST_LAYOUTS = 1000  # in larger spaces, a coarse sweep evaluates only layouts of round sizes
_STAGE = ("dp", "kvp", "tpa", "tpf", "ep", "ffn_replicas")
_POINT = ("layout", "batch", "ttl_s")
_MEMORY = ("weights_bytes", "kv_bytes")
_COSTS = ("seconds", "flops", "hbm_bytes", "net_bytes")
_CONFIGURATION = ("point", "chunk", "activations_bytes", "ttl_p95_s", "longest_s")
_PROMPTS = ("busy_s", "wait_s", "step_s")
_OWNERS = ("kvp_rank", "tpa_rank", "tpf_rank", "ep_rank", "kv_heads", "query_heads", "merged_query_heads", "experts")
# Number of bits to keep of float32's 23-bit mantissa. The error is 1 in 4096, and the compressed data is half as large.
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
    """The data that the page loads."""

    document: dict[str, Any]  # JSON
    numbers: NDArray[np.float32]  # flattened and concatenated matrices of all tables


@dataclass(frozen=True)
class _Selection:
    """Points of a sweep that the page shows."""

    points: Points  # `layout` is an index into the whole space
    frontiers: list[list[list[int]]]  # positions of each frontier in `points`, by cap and strategy
    short_bytes: list[float]  # missing memory for one request, in the layout that needs least more, by cap
    configurations: int  # number of evaluated configurations


@dataclass(frozen=True)
class _Table:
    """The points and configurations for one length and pair of dtypes."""

    selection: _Selection
    points: NDArray[np.float32]  # (rows, points), one quantity per row
    configurations: NDArray[np.float32]  # (rows, configurations), one quantity per row
    item_names: list[str]  # names of the cost items


def page_data(plan: Plan, model_name: str, answer: dict[str, Any]) -> PageData:
    """Collect the page's data for a plan and for other lengths and dtypes.

    Args:
        answer: the part of the plan's JSON that another page compares with its own plan.
    """
    question, searched = plan.question, plan.sweep.space
    settings, questions = _settings(question.setting), _questions(question)
    tables = _tables(plan, settings, questions)
    used = np.unique(np.concatenate([table.selection.points.layout for table in tables]))
    document = {
        "model": model_name,
        "system": question.setting.system.name,
        **_model(question.setting),
        **_choices(settings, questions),
        "asked": _initial(question, questions),
        "answer": answer,
        "looked_at": sum(table.selection.configurations for table in tables),
        "accepted_tokens": question.setting.drafts.accepted,
        "output_tokens": None if question.demand is None else question.demand.output_tokens,
        "strategies": [vars(strategy) for strategy in STRATEGIES],
        "layouts": [_layout(searched, int(index)) for index in used],
        "owner_rows": _OWNERS,
        "owners": _owners(question.setting.model, searched, used),
        "point_rows": [*_POINT, *_MEMORY],
        "item_rows": _COSTS,
        "items": [{"name": name, "kind": kind_of(name)} for name in tables[0].item_names],
        "configuration_rows": [*_CONFIGURATION, *(() if question.demand is None else _PROMPTS)],
        "tables": [_outline(table) for table in tables],
    }
    for table in tables:
        table.points[0] = np.searchsorted(used, table.selection.points.layout)
    matrices = [matrix for table in tables for matrix in (table.points, table.configurations)]
    return PageData(document, np.concatenate([matrix.ravel() for matrix in matrices]))


def gpu_caps(max_gpus: int) -> list[int]:
    """Return the numbers of GPUs on the page: the powers of two below `max_gpus`, and `max_gpus`."""
    return [2**power for power in range(max_gpus.bit_length()) if 2**power < max_gpus] + [max_gpus]


def kind_of(item_name: str) -> str | None:
    """Return the kind of work of a cost item; None if the page does not know the item."""
    return next((kind for kind, names in _KINDS.items() if item_name in names), None)


def _model(setting: Setting) -> dict[str, Any]:
    model, system = setting.model, setting.system
    return {
        "capacity_bytes": system.usable_bytes,
        "shares_capacity": system.shared,
        "num_layers": model.num_layers,
        "num_experts": model.num_experts,
        "latent": model.has_latents,
    }


def _choices(settings: list[Setting], questions: list[Question]) -> dict[str, Any]:
    """Return the lengths, dtypes and numbers of GPUs that the page offers."""
    return {
        "lengths": [each.context for each in questions],
        "dtypes": [[setting.weights_in, setting.dtypes.kv] for setting in settings],
        "expert_dtypes": [setting.experts_in for setting in settings],
        "gpu_caps": gpu_caps(questions[0].max_gpus),
        "least_chunk": LEAST_CHUNK,
        "little_more": LITTLE_MORE,
        "little_less": LITTLE_LESS,
    }


def _initial(question: Question, questions: list[Question]) -> dict[str, Any]:
    """Return the page's initial inputs, except the dtypes (the first pair) and the GPUs (the largest number)."""
    return {
        "length": questions.index(question),
        "ttl_s": question.ttl_s,
        "ttl_with_prefill_s": question.ttl_with_prefill_s,
        "ttft_s": question.ttft_s,
        "users": question.users,
        "rate_per_s": question.rate_per_s,
        "gpu_hour": question.gpu_hour,
        "fewest_gpus": question.fewest_gpus,
    }


def _outline(table: _Table) -> dict[str, Any]:
    """Return the sizes and frontiers of a table, without its numbers."""
    return {
        "points": table.points.shape[1],
        "configurations": table.configurations.shape[1],
        "frontiers": table.selection.frontiers,
        "short_bytes": table.selection.short_bytes,
    }


def _tables(plan: Plan, settings: list[Setting], questions: list[Question]) -> list[_Table]:
    """Return one table for each pair of dtypes and each length, ordered by pair and then by length."""
    searched, caps = plan.sweep.space, gpu_caps(plan.question.max_gpus)
    quick = _fastest_prefills(_service_load(plan.question.setting, plan.question), searched, caps)
    tables = []
    for setting in settings:
        for question in questions:
            load = _service_load(setting, question)
            if setting is plan.question.setting and question is plan.question:
                tables.append(_plan_table(load, plan, caps, quick))
            else:
                tables.append(_table(load, _selection_around(load, searched, caps, quick), searched, _SOME_CHUNKS))
    return tables


def _settings(setting: Setting) -> list[Setting]:
    """Return the plan's setting, and the same setting with other dtypes that the system can compute in."""
    pairs = [pair for pair in DTYPES if pair != (setting.weights_in, setting.dtypes.kv)]
    known = [pair for pair in pairs if all(dtype in setting.system.arithmetic.flops_per_s for dtype in pair)]
    return [setting, *(_in_dtypes(setting, weights, kv) for weights, kv in known[:_MORE_DTYPES])]


def _in_dtypes(setting: Setting, weights: str, kv: str) -> Setting:
    """Return the setting with other dtypes. A separate expert dtype is kept only if the weight dtype stays the same."""
    if weights == setting.weights_in:
        return replace(setting, dtypes=replace(setting.dtypes, kv=kv))
    return replace(setting, dtypes=Dtypes(weights, kv, setting.dtypes.attention))


def _questions(question: Question) -> list[Question]:
    """Return the plan's question and the same question with shorter and longer requests.

    With a demand, only the prompts change.
    """
    found = {each.context: each for each in (_scaled(question, times) for times in LENGTHS)}
    return [scaled for _, scaled in sorted((found | {question.context: question}).items())]


def _scaled(question: Question, times: float) -> Question:
    def tokens(count: int) -> int:
        return max(1, round(times * count))

    if question.demand is None:
        return replace(question, context=tokens(question.context))
    kinds = (Kind(each.share, tokens(each.input_tokens), each.output_tokens) for each in question.demand.kinds)
    demand = Demand(tuple(kinds), question.demand.rate_per_s, question.demand.prefix_hit)
    return replace(question, context=demand.longest, demand=demand)


def _service_load(setting: Setting, question: Question) -> ServiceLoad:
    return ServiceLoad(setting, question.context, question.demand, question.ttft_s)


def _fastest_prefills(load: ServiceLoad, searched: Space, caps: list[int]) -> _Index:
    """Return the layouts that prefill the longest prompt fastest, for each chunk size, cap and strategy.

    These layouts are not always on a frontier, because frontiers compare decode.
    """
    layouts, found = searched.layouts, []
    for chunk in _PREFILL_CHUNKS:
        fits = load.memory_bytes(layouts, 1.0, chunk) <= load.setting.capacity_bytes(layouts)
        ttft_s = np.where(fits, prompts(load, layouts, chunk * layouts.ones).longest_s, np.inf)
        for cap in caps:
            for strategy in range(len(STRATEGIES)):
                allowed = np.where((layouts.world_size <= cap) & (searched.strategy == strategy), ttft_s, np.inf)
                found += [int(allowed.argmin())] if np.isfinite(allowed).any() else []
    return np.unique(np.array(found, dtype=np.intp))


def _plan_table(load: ServiceLoad, plan: Plan, caps: list[int], quick: _Index) -> _Table:
    """Return the plan's table: its frontiers, its recommended and nearest choices, and the fastest prefills."""
    searched = plan.sweep.space
    named = [*([] if plan.best is None else [plan.best]), *plan.nearest]
    selection = _select(
        plan.sweep, index=np.arange(len(searched)), caps=caps, most=MOST_PLAN_POINTS, ttl_s=plan.question.ttl_s
    )
    more = [_point_of(load, searched, choice) for choice in named]
    more.append(_prefill_points(searched, plan.sweep, np.arange(len(searched)), quick))
    return _table(load, _with_points(selection, more), searched, CHUNKS)


def _selection_around(load: ServiceLoad, searched: Space, caps: list[int], quick: _Index) -> _Selection:
    """Select the points of a table that is not the plan's table.

    A coarse sweep finds the layouts on a frontier. A fine sweep then evaluates more batch sizes for these layouts and
    for the layouts with the fastest prefill.
    """
    some = np.arange(len(searched)) if len(searched) <= _MOST_LAYOUTS else _round_sizes(searched)
    coarse = unit_sweep(load, _subspace(searched, some), _batches(_COARSE))
    rough = _select(coarse, some, caps, None)
    chosen = np.union1d(rough.points.layout, quick)
    fine = unit_sweep(load, _subspace(searched, chosen), _batches(_FINE))
    selection = _select(fine, chosen, caps, MOST_POINTS)
    counted = coarse.configurations + fine.configurations
    selection = replace(selection, short_bytes=rough.short_bytes, configurations=counted)
    return _with_points(selection, [_prefill_points(searched, fine, chosen, quick)])


def _subspace(searched: Space, index: _Index) -> Space:
    return Space(searched.layouts.take(index), searched.strategy[index])


def _round_sizes(searched: Space) -> _Index:
    """Return the layouts of round sizes.

    The number of stages and the number of ranks per stage must be a power of two, or three times a power of two. The
    largest number of ranks per stage is also allowed.
    """
    round_numbers = [times * 2.0**power for times in (1, 3) for power in range(12)]
    ranks, stages = searched.layouts.num_ranks, searched.layouts.pp
    return np.flatnonzero(np.isin(ranks, [*round_numbers, ranks.max()]) & np.isin(stages, round_numbers))


def _batches(per_octave: int) -> Array:
    return np.unique(np.round(2.0 ** np.arange(0, np.log2(MOST_BATCH) + 1, 1 / per_octave)))


def _prefill_points(searched: Space, found: Sweep, index: _Index, quick: _Index) -> Points:
    """Return the points of the layouts `quick` with 1, 4, 16 and so on requests per unit.

    Args:
        index: index of each layout of the sweep in the whole space.
    """
    layout = index[found.points.layout]
    octave = np.log2(found.points.batch / units(searched.layouts)[layout])
    points = found.points.take(np.isin(layout, quick) & (octave % _PREFILL_OCTAVES == 0))
    return replace(points, layout=index[points.layout])


def _point_of(load: ServiceLoad, searched: Space, choice: Choice) -> Points:
    """Return the point with the layout and batch size of a choice."""
    strategies = [strategy.name for strategy in STRATEGIES]
    alike = np.flatnonzero(searched.strategy == strategies.index(choice.strategy))
    index = np.array([next(each for each in alike if degrees(searched.layouts, int(each)) == choice.layout)])
    layouts, batch = searched.layouts.take(index), np.array([float(choice.batch)])
    return Points(
        layout=index,
        batch=batch,
        gpus=layouts.world_size,
        ttl_s=load.token_seconds(layouts, batch),
        memory_bytes=load.memory_bytes(layouts, batch, 0.0),
    )


def _select(found: Sweep, index: _Index, caps: list[int], most: int | None, ttl_s: float | None = None) -> _Selection:
    """Select the points of each frontier.

    Args:
        index: index of each layout of the sweep in the whole space.
        caps: maximum numbers of GPUs, in ascending order.
        most: maximum number of points per frontier; None selects all.
        ttl_s: TTL target. The best point that meets the target is also selected.
    """
    strategies = found.space.strategy[found.points.layout]
    frontiers = [
        list(
            _frontiers_by_cap(
                found.points, members=np.flatnonzero(strategies == number), caps=caps, most=most, ttl_s=ttl_s
            )
        )
        for number in range(len(STRATEGIES))
    ]
    kept = np.unique(np.concatenate([line for of_caps in frontiers for line in of_caps]))
    points = found.points.take(kept)
    gpus = found.space.layouts.world_size
    return _Selection(
        replace(points, layout=index[points.layout]),
        [[np.searchsorted(kept, of_caps[cap]).tolist() for of_caps in frontiers] for cap in range(len(caps))],
        [float(found.short_bytes[gpus <= cap].min(initial=np.inf)) for cap in caps],
        found.configurations,
    )


def _frontiers_by_cap(
    points: Points, members: _Index, caps: list[int], most: int | None, ttl_s: float | None
) -> Iterator[_Index]:
    """Yield the frontier of the points `members` for each cap, computed from the frontier for the previous cap."""
    user, gpu, gpus = points.user_tokens_per_s, points.gpu_tokens_per_s, points.gpus[members]
    best, below = np.zeros(0, dtype=np.intp), 0
    for cap in caps:
        best = np.concatenate([best, members[(gpus > below) & (gpus <= cap)]])
        best = best[frontier(user[best], gpu[best])]
        below = cap
        yield best if most is None else best[_thinned(user[best], most, ttl_s)]


def _thinned(ascending: Array, most: int, ttl_s: float | None) -> _Index:
    """Return positions of at most `most` numbers, evenly spread on a logarithmic axis and including both ends.

    The position of the first number that meets the TTL target is added.
    """
    if len(ascending) <= most:
        return np.arange(len(ascending))
    wanted = np.geomspace(ascending[0], ascending[-1], most)
    kept = np.append(np.searchsorted(ascending[:-1], wanted[:-1]), len(ascending) - 1)
    in_time = [] if ttl_s is None else [np.searchsorted(ascending[:-1], 1 / ttl_s)]
    return np.unique(np.append(kept, in_time).astype(np.intp))


def _with_points(selection: _Selection, more: Iterable[Points]) -> _Selection:
    """Return the selection with additional points, which are not on any frontier."""
    parts = [selection.points, *more]
    names = ("layout", "batch", "gpus", "ttl_s", "memory_bytes")
    return replace(
        selection, points=Points(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
    )


def _table(load: ServiceLoad, selection: _Selection, searched: Space, chunks: tuple[int, ...]) -> _Table:
    points = selection.points
    layouts = searched.layouts.take(points.layout)
    held = load.memory(layouts, points.batch, 0.0)
    # Costs are per token. A step produces several tokens if drafts are accepted.
    share = 1 / load.setting.drafts.accepted
    items = [item.times(share) for item in decode_items(load.setting, layouts, points.batch, load.kv_tokens)]
    exact = np.array([points.layout, points.batch, points.ttl_s], dtype=np.float32)
    measured = [getattr(held, name) for name in _MEMORY]
    measured += [getattr(item, name) for name in _COSTS for item in items]
    rows = np.vstack([exact, _rounded(np.array(measured))])
    return _Table(selection, rows, _configurations(load, points, searched, chunks), [item.name for item in items])


def _configurations(load: ServiceLoad, points: Points, searched: Space, chunks: tuple[int, ...]) -> NDArray[np.float32]:
    """Return each point with each chunk size that fits in memory: (rows, configurations)."""
    point, chunk = np.repeat(np.arange(len(points)), len(chunks)), np.tile(np.array(chunks, dtype=float), len(points))
    layouts, batch = searched.layouts.take(points.layout[point]), points.batch[point]
    held = load.memory(layouts, batch, chunk)
    fits = np.flatnonzero(held.total_bytes <= load.setting.capacity_bytes(layouts))
    point, chunk, batch, layouts = point[fits], chunk[fits], batch[fits], layouts.take(fits)
    decodes = load.decodes(layouts, batch)
    found = prompts(load, layouts, chunk, decodes)
    rows = [point, chunk, held.activations_bytes[fits], mixed_seconds(load, layouts, batch, chunk), found.longest_s]
    if load.demand is not None:
        step_s = layouts.pp * found.busy_s / found.chunks / load.setting.drafts.accepted
        rows += [found.busy_s, found.wait_s, step_s]
    return np.array(rows, dtype=np.float32).reshape(len(rows), -1)


def _rounded(numbers: Array) -> NDArray[np.float32]:
    """Round to float32 numbers whose last bits are zero, which compress better."""
    dropped = np.uint32(23 - _KEPT_BITS)
    bits = numbers.astype(np.float32).view(np.uint32) + (np.uint32(1) << (dropped - np.uint32(1)))
    return (bits >> dropped << dropped).view(np.float32)


def _layout(searched: Space, index: int) -> dict[str, Any]:
    found = degrees(searched.layouts, index)
    return {
        **found,
        "words": in_words(found),
        "strategy": int(searched.strategy[index]),
        "gpus": int(searched.layouts.world_size[index]),
        "stage": _stage(searched, index),
    }


def _stage(searched: Space, index: int) -> str:
    """Return the degrees that determine what each rank owns, as a key of `_owners`."""
    return " ".join(str(int(getattr(searched.layouts, name)[index])) for name in _STAGE)


def _owners(model: ModelSpec, searched: Space, used: _Index) -> dict[str, list[list[Any]]]:
    """Return what each rank owns of the first layers, for each stage that the page can draw.

    Keys are the degrees of the stage.
    """
    drawn = used[searched.layouts.num_ranks[used] <= MOST_DRAWN]
    stages = {_stage(searched, int(index)): searched.layouts.take(np.array([index])) for index in drawn}
    heads, num_experts = model.attentions[0].heads, model.num_experts
    return {stage: _stage_owners(layouts, heads, num_experts) for stage, layouts in stages.items()}


def _stage_owners(layouts: Layouts, heads: HeadShape, num_experts: int) -> list[list[Any]]:
    """Return what each rank owns, in the order of _OWNERS. Ranges are pairs of first and last."""
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
