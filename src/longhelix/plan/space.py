"""The layouts that a plan chooses from: for each strategy, all factorisations of all numbers of GPUs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from longhelix.perf.layouts import Layouts, Stages
from longhelix.spec import ModelSpec
from longhelix.spec.ffn import MLP


@dataclass(frozen=True)
class Strategy:
    """A parallelism strategy for the ranks of one pipeline stage."""

    name: str  # name in JSON
    title: str  # name that users see


STRATEGIES = (
    Strategy("tp", "TP"),
    Strategy("dp_ep", "DP attention + EP"),
    Strategy("dp_tp", "DP attention + TP FFN"),
    Strategy("tied", "Medha (tied KVP)"),
    Strategy("helix", "Helix"),
    Strategy("helix_exposed", "Helix without HOP-B"),
    Strategy("helix_dp", "DP x KVP"),
)
HELIX = ("helix_exposed", "helix", "helix_dp")
OVERLAPPED = ("helix", "helix_dp")  # strategies with HOP-B
_Degrees = tuple[int, int, int, int, int, int]  # dp, kvp, tpa, tpf, ep, ffn_replicas


@dataclass(frozen=True)
class Space:
    """Layouts and the strategy of each layout."""

    layouts: Layouts
    strategy: np.ndarray[tuple[int], np.dtype[np.intp]]  # index of each layout's strategy in STRATEGIES

    def __len__(self) -> int:
        return len(self.layouts)


def space(model: ModelSpec, max_gpus: int, node_gpus: int | None = None) -> Space:
    """Return all layouts that have up to `max_gpus` GPUs in total and that the model's heads and experts allow.

    Args:
        node_gpus: GPUs per server. If set, the numbers of ranks, stages and GPUs must be powers of two or multiples
            of `node_gpus`, and degrees must divide heads, columns and experts evenly. None allows any shape.
    """
    rows = [
        (*degrees, pp, name in OVERLAPPED, index)
        for num_ranks in range(1, max_gpus + 1)
        if _is_whole(num_ranks, node_gpus)
        for index, name in enumerate(strategy.name for strategy in STRATEGIES)
        for degrees in _STAGES[name](model, num_ranks)
        if node_gpus is None or _divides(model, degrees)
        for pp in range(1, min(model.num_layers, max_gpus // num_ranks) + 1)
        if _is_whole(pp, node_gpus) and _is_whole(num_ranks * pp, node_gpus)
    ]
    columns = np.array(rows, dtype=np.float64).reshape(-1, 9).T
    dp, kvp, tpa, tpf, ep, ffn_replicas, pp, hop_b, strategy = columns
    layouts = Layouts(
        dp=dp,
        kvp=kvp,
        tpa=tpa,
        tpf=tpf,
        ep=ep,
        ffn_replicas=ffn_replicas,
        stages=Stages.even(pp),
        hop_b=hop_b.astype(np.bool_),
    )
    return Space(layouts, strategy.astype(np.intp))


def _is_whole(number: int, node_gpus: int | None) -> bool:
    return node_gpus is None or number & (number - 1) == 0 or number % node_gpus == 0


def _divides(model: ModelSpec, degrees: _Degrees) -> bool:
    """True if heads, columns and experts divide evenly over the ranks."""
    _, _, tpa, tpf, ep, _ = degrees
    heads = [attention.heads for attention in model.attentions]
    even_heads = all(each.num_kv_heads % tpa == 0 or tpa % each.num_kv_heads == 0 for each in heads)
    sizes = [(each.num_query_heads, tpa) for each in heads]
    if model.moes:
        sizes += [size for moe in model.moes for size in ((moe.expert_size, tpf), (moe.num_experts, ep))]
    else:
        sizes += [(ffn.num_columns, tpf) for ffn in model.ffns if isinstance(ffn, MLP)]
    return even_heads and all(size % degree == 0 for size, degree in sizes)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _ffn_grids(model: ModelSpec, num_ranks: int) -> Iterator[tuple[int, int]]:
    """Yield all pairs (TPF, EP). A dense FFN counts as one expert."""
    for ep in _divisors(num_ranks):
        if ep <= model.num_experts:
            yield num_ranks // ep, ep


def _attention_grids(model: ModelSpec, num_ranks: int) -> Iterator[tuple[int, int]]:
    """Yield all pairs (KVP ranks or groups, TPA) with at least two KVP ranks or groups.

    TPA is at most the number of KV heads.
    """
    for tpa in _divisors(num_ranks):
        if tpa <= model.fewest_heads.num_kv_heads and tpa < num_ranks:
            yield num_ranks // tpa, tpa


def _tp(model: ModelSpec, num_ranks: int) -> Iterator[_Degrees]:
    if num_ranks <= model.fewest_heads.num_query_heads:
        for tpf, ep in _ffn_grids(model, num_ranks):
            yield 1, 1, num_ranks, tpf, ep, 1


def _dp_ep(model: ModelSpec, num_ranks: int) -> Iterator[_Degrees]:
    if model.moes and num_ranks <= model.num_experts:
        for dp, tpa in _attention_grids(model, num_ranks):
            yield dp, 1, tpa, 1, num_ranks, 1


def _dp_tp(model: ModelSpec, num_ranks: int) -> Iterator[_Degrees]:
    for dp, tpa in _attention_grids(model, num_ranks):
        yield dp, 1, tpa, num_ranks, 1, 1


def _tied(model: ModelSpec, num_ranks: int) -> Iterator[_Degrees]:
    for kvp, tpa in _attention_grids(model, num_ranks):
        yield 1, kvp, tpa, tpa, 1, kvp


def _helix(model: ModelSpec, num_ranks: int) -> Iterator[_Degrees]:
    for kvp, tpa in _attention_grids(model, num_ranks):
        for tpf, ep in _ffn_grids(model, num_ranks):
            yield 1, kvp, tpa, tpf, ep, 1


def _helix_dp(model: ModelSpec, num_ranks: int) -> Iterator[_Degrees]:
    """Yield layouts with several data-parallel groups. Each group has several KVP ranks and its own requests."""
    for dp in _divisors(num_ranks)[1:]:
        for kvp, tpa in _attention_grids(model, num_ranks // dp):
            for tpf, ep in _ffn_grids(model, num_ranks):
                yield dp, kvp, tpa, tpf, ep, 1


_STAGES: dict[str, Callable[[ModelSpec, int], Iterator[_Degrees]]] = {
    "tp": _tp,
    "dp_ep": _dp_ep,
    "dp_tp": _dp_tp,
    "tied": _tied,
    "helix_exposed": _helix,
    "helix": _helix,
    "helix_dp": _helix_dp,
}
