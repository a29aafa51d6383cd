"""What the planner's page shows: the frontiers of every context, pair of dtypes and number of GPUs that one can set."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longhelix.layout import HeadShape, Layout
from longhelix.perf.layouts import Array
from longhelix.perf.memory import memory
from longhelix.perf.setting import Setting
from longhelix.perf.step import WAIT, decode_items
from longhelix.plan.pareto import frontier
from longhelix.plan.space import STRATEGIES, Space, space
from longhelix.plan.sweep import Points, Sweep, batches, layouts_of, sweep
from longhelix.spec import FORMATS, HardwareSpec, ModelSpec

CONTEXTS = (4096, 16384, 65536, 262144, 1_000_000, 4_000_000)
DTYPES = ("fp4", "fp8", "bfloat16")
MOST_POINTS = 28
MOST_DRAWN = 144
_BATCHES_PER_OCTAVE, _OCTAVES = 2, 16
_MOST_LAYOUTS = 4000
_STAGE = ("dp", "kvp", "tpa", "tpf", "ep", "ffn_replicas")
_EXACT = (*_STAGE, "pp", "strategy", "batch", "ttl_s")
_MEMORY = ("weights_bytes", "kv_bytes", "activations_bytes")
_OWNERS = ("kvp_rank", "tpa_rank", "tpf_rank", "ep_rank", "kv_heads", "query_heads", "merged_query_heads", "experts")
_COSTS = ("seconds", "flops", "hbm_bytes", "net_bytes")
# Of float32's 23 bits of mantissa: 1 part in 8192, and half the bytes once compressed.
_KEPT_BITS = 12
_NO_TTL_S = 0.05
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


@dataclass(frozen=True)
class Asked:
    """What the page opens with: at most `max_gpus`, `context` tokens, and seconds per token, if any are set. Drafts are
    those of `Setting`, in all that it shows.

    expert_dtype: of experts, where all other weights are in `weight_dtype`; None: that as well.
    """

    max_gpus: int
    context: float
    weight_dtype: str
    kv_dtype: str
    ttl_s: float | None
    expert_dtype: str | None = None
    draft_tokens: int = 0
    accepted_tokens: float = 1.0


@dataclass(frozen=True)
class PageData:
    """`document` is for JSON; `numbers` holds the matrices of its tables, one after the other."""

    document: dict[str, Any]
    numbers: NDArray[np.float32]


@dataclass(frozen=True)
class _Table:
    """One context and pair of dtypes. A row of `matrix` is a number of every point.

    frontiers: positions of points, by cap and strategy. short_bytes: what the nearest layout lacks per GPU for one
    request, by cap.
    """

    matrix: NDArray[np.float32]
    item_names: list[str]
    frontiers: list[list[list[int]]]
    short_bytes: list[float]
    configurations: int

    def row(self, name: str) -> NDArray[np.float32]:
        return np.asarray(self.matrix[_EXACT.index(name)])


def page_data(model: ModelSpec, model_name: str, system: HardwareSpec, asked: Asked) -> PageData:
    """Sweep every choice once; what is asked for gets all layouts and batch sizes, and keeps its whole frontiers.

    Raises UserError where the system has no arithmetic in a dtype that is asked for.
    """
    every, caps = space(model, asked.max_gpus), gpu_caps(asked.max_gpus)
    some = every if len(every) <= _MOST_LAYOUTS else _round(every)
    asked_key = _key(asked.context, asked.weight_dtype, asked.kv_dtype)
    tables: dict[str, _Table] = {}
    for setting, context in _choices(model, system, asked):
        key = _key(context, setting.weight_dtype, setting.kv_dtype)
        whole = key == asked_key
        found = sweep(setting, every, context, batches()) if whole else sweep(setting, some, context, _few_batches())
        tables[key] = _table(setting, found, context, caps, None if whole else MOST_POINTS)
    document = {
        "model": model_name,
        "system": system.name,
        "capacity_bytes": system.usable_bytes,
        "num_layers": model.num_layers,
        "num_experts": model.moe.num_experts if model.moe else 1,
        "latent": model.mla is not None,
        "configurations": sum(table.configurations for table in tables.values()),
        "contexts": _contexts(asked),
        "weight_dtypes": _dtypes(system, asked.weight_dtype),
        "kv_dtypes": _dtypes(system, asked.kv_dtype),
        "gpu_caps": caps,
        "strategies": [vars(strategy) for strategy in STRATEGIES],
        "asked": {**vars(asked), "ttl_s": asked.ttl_s or _balanced_ttl_s(tables[asked_key])},
        "rows": [*_EXACT, *_MEMORY],
        "item_rows": _COSTS,
        "items": [{"name": name, "kind": kind_of(name)} for name in tables[asked_key].item_names],
        "owner_rows": _OWNERS,
        "owners": _owners(model, tables.values()),
        "tables": {
            key: {"points": table.matrix.shape[1], "frontiers": table.frontiers, "short_bytes": table.short_bytes}
            for key, table in tables.items()
        },
    }
    return PageData(document, np.concatenate([table.matrix.ravel() for table in tables.values()]))


def gpu_caps(max_gpus: int) -> list[int]:
    """Powers of two below `max_gpus`, and that."""
    return [2**power for power in range(max_gpus.bit_length()) if 2**power < max_gpus] + [max_gpus]


def kind_of(item_name: str) -> str | None:
    """The kind of work that a cost item is, or None for one that this page does not know."""
    return next((kind for kind, names in _KINDS.items() if item_name in names), None)


def _key(context: float, weight_dtype: str, kv_dtype: str) -> str:
    return f"{context:.0f} {weight_dtype} {kv_dtype}"


def _contexts(asked: Asked) -> list[float]:
    return sorted({*map(float, CONTEXTS), asked.context})


def _dtypes(system: HardwareSpec, asked: str) -> list[str]:
    offered = {asked, *(dtype for dtype in DTYPES if dtype in system.flops_per_s)}
    return sorted(offered, key=lambda dtype: (FORMATS[dtype].bits, dtype))


def _choices(model: ModelSpec, system: HardwareSpec, asked: Asked) -> Iterator[tuple[Setting, float]]:
    for weight_dtype in _dtypes(system, asked.weight_dtype):
        for kv_dtype in _dtypes(system, asked.kv_dtype):
            for context in _contexts(asked):
                experts = asked.expert_dtype if weight_dtype == asked.weight_dtype else None
                drafts = asked.draft_tokens, asked.accepted_tokens
                yield Setting(model, system, weight_dtype, kv_dtype, None, experts, *drafts), context


def _round(every: Space) -> Space:
    """Layouts whose stages, and whose ranks in a stage, are a power of two or three times one, or the most."""
    round_numbers = [times * 2.0**power for times in (1, 3) for power in range(12)]
    ranks, stages = every.layouts.num_ranks, every.layouts.pp
    kept = np.isin(ranks, [*round_numbers, ranks.max()]) & np.isin(stages, round_numbers)
    return Space(every.layouts.take(kept), every.strategy[kept])


def _few_batches() -> Array:
    return np.unique(np.round(2.0 ** np.arange(0, _OCTAVES, 1 / _BATCHES_PER_OCTAVE)))


def _table(setting: Setting, found: Sweep, context: float, caps: list[int], most: int | None) -> _Table:
    kept, frontiers = _frontiers(found, caps, most)
    item_names, matrix = _matrix(setting, found.space, found.points.take(kept), context)
    gpus = found.space.layouts.world_size
    short_bytes = [float(found.short_bytes[gpus <= cap].min()) for cap in caps]
    return _Table(matrix, item_names, frontiers, short_bytes, found.configurations)


def _frontiers(found: Sweep, caps: list[int], most: int | None) -> tuple[NDArray[np.intp], list[list[list[int]]]]:
    """Points on any frontier, and for each cap and strategy the positions among them of those on its own."""
    strategies = found.space.strategy[found.points.layout]
    lines = [list(_growing(found.points, strategies == index, caps, most)) for index in range(len(STRATEGIES))]
    kept = np.unique(np.concatenate([line for of_caps in lines for line in of_caps]))
    return kept, [[np.searchsorted(kept, of_caps[cap]).tolist() for of_caps in lines] for cap in range(len(caps))]


def _growing(points: Points, mask: NDArray[np.bool_], caps: list[int], most: int | None) -> Iterator[NDArray[np.intp]]:
    """The frontier of the points in `mask` under each cap, made from the one before."""
    user, gpu = points.user_tokens_per_s, points.gpu_tokens_per_s
    best, below = np.zeros(0, dtype=np.intp), 0
    for cap in caps:
        best = np.concatenate([best, np.flatnonzero(mask & (points.gpus > below) & (points.gpus <= cap))])
        best = best[frontier(user[best], gpu[best])]
        below = cap
        yield best if most is None else best[_thinned(user[best], most)]


def _thinned(ascending: Array, most: int) -> NDArray[np.intp]:
    """Positions of at most `most` numbers, evenly spread on a logarithmic axis, ends included."""
    if len(ascending) <= most:
        return np.arange(len(ascending))
    wanted = np.geomspace(ascending[0], ascending[-1], most)
    return np.unique(np.append(np.searchsorted(ascending[:-1], wanted[:-1]), len(ascending) - 1))


def _matrix(setting: Setting, space: Space, points: Points, context: float) -> tuple[list[str], NDArray[np.float32]]:
    """Names of the cost items, and rows: _EXACT, _MEMORY, then for each of _COSTS those of all items."""
    layouts = layouts_of(space, points)
    degrees = [getattr(layouts, name) for name in (*_STAGE, "pp")]
    exact = np.array([*degrees, space.strategy[points.layout], points.batch, points.ttl_s], dtype=np.float32)
    held = memory(setting, layouts, points.batch, context)
    # Of a token: a step gives several where drafts are accepted.
    share = 1 / setting.accepted_tokens
    items = [item.times(share) for item in decode_items(setting, layouts, points.batch, context)]
    measured = [getattr(held, name) for name in _MEMORY]
    measured += [getattr(item, name) for name in _COSTS for item in items]
    return [item.name for item in items], np.vstack([exact, _rounded(np.array(measured))])


def _rounded(numbers: Array) -> NDArray[np.float32]:
    """Float32 whose last bits are zero, so that it compresses."""
    dropped = np.uint32(23 - _KEPT_BITS)
    bits = numbers.astype(np.float32).view(np.uint32) + (np.uint32(1) << (dropped - np.uint32(1)))
    return (bits >> dropped << dropped).view(np.float32)


def _balanced_ttl_s(table: _Table) -> float:
    """Where tokens/s/user times tokens/s/GPU is largest; any number where nothing fits."""
    if not table.matrix.shape[1]:
        return _NO_TTL_S
    gpus = table.row("dp") * table.row("kvp") * table.row("tpa") * table.row("pp")
    return float(table.row("ttl_s")[np.argmax(table.row("batch") / gpus / table.row("ttl_s") ** 2)])


def _owners(model: ModelSpec, tables: Iterable[_Table]) -> dict[str, list[list[Any]]]:
    """What each rank of each stage that can be drawn owns, ranges as first and last; keys are the stage's degrees."""
    heads = HeadShape(model.num_query_heads, model.num_kv_heads)
    num_experts = model.moe.num_experts if model.moe else 1
    stages = np.unique(np.hstack([table.matrix[: len(_STAGE)] for table in tables]).astype(int), axis=1)
    stages = stages[:, stages[0] * stages[1] * stages[2] <= MOST_DRAWN]
    return {" ".join(map(str, stage)): _stage_owners(stage, heads, num_experts) for stage in stages.T.tolist()}


def _stage_owners(stage: list[int], heads: HeadShape, num_experts: int) -> list[list[Any]]:
    dp, kvp, tpa, tpf, ep, ffn_replicas = stage
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
