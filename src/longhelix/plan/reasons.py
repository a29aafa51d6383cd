"""Explain, with bytes and seconds, why the neighbours of a layout are slower and why layouts were rejected."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from longhelix.perf.cost_item import CostItem
from longhelix.perf.layouts import Layouts
from longhelix.perf.memory import Memory, memory
from longhelix.perf.setting import Setting
from longhelix.perf.step import decode_items
from longhelix.plan.candidate import as_layouts, degrees, in_words
from longhelix.plan.choice import Choice
from longhelix.plan.question import Question
from longhelix.plan.service import ServiceLoad, service
from longhelix.plan.space import OVERLAPPED, STRATEGIES
from longhelix.plan.sweep import Sweep


@dataclass(frozen=True)
class Neighbour:
    """A layout that differs from the best one in a single decision, with the same GPUs, batch and chunk size."""

    change: str  # description of the difference
    layout: str  # description of the layout
    ttl_s: float | None  # mean TTL, as in `Choice`; None if the layout does not fit
    reason: str  # the cost items that take longer in a decode step, or the missing memory


@dataclass(frozen=True)
class Rejection:
    """The layouts of one strategy that have too little memory for one request."""

    strategy: str
    rejected: int  # number of layouts with too little memory
    layouts: int  # number of layouts of the strategy
    reason: str  # the layout that lacks the least memory, and how much it lacks


def neighbours(question: Question, best: Choice) -> list[Neighbour]:
    """Return the neighbours of the best layout. Each neighbour changes one decision."""
    use = ServiceLoad(question.setting, question.context, question.demand, question.ttft_s)
    own_items = _decode_items(use, as_layouts(best.layout, hop_b=best.strategy in OVERLAPPED), best)
    found = []
    for change, layout, hop_b in _changes(question.setting, best):
        layouts = as_layouts(layout, hop_b=hop_b)
        needed = use.memory(layouts, float(best.batch), float(best.chunk_tokens))
        words = in_words(layout)
        short = _short(question.setting, layouts, needed)
        if short:
            found.append(Neighbour(change, words, None, short))
            continue
        given = service(use, layouts, best.batch * layouts.ones, best.chunk_tokens * layouts.ones)
        why = _difference(own_items, _decode_items(use, layouts, best))
        found.append(Neighbour(change, words, float(given.ttl_s[0]), why))
    return found


def rejections(question: Question, searched: Sweep) -> list[Rejection]:
    """Return a `Rejection` for each strategy that has layouts with too little memory for one request."""
    found = []
    for index, strategy in enumerate(STRATEGIES):
        layouts = np.flatnonzero(searched.space.strategy == index)
        short_bytes = searched.short_bytes[layouts]
        if not (short_bytes > 0).any():
            continue
        nearest = layouts[np.argmin(np.where(short_bytes > 0, short_bytes, np.inf))]
        held = searched.space.layouts.take(np.array([nearest]))
        needed = memory(question.setting, held, 1.0, float(question.context))
        words = f"the closest layout, {in_words(degrees(held, 0))}, {_short(question.setting, held, needed)}"
        found.append(Rejection(strategy.name, int((short_bytes > 0).sum()), len(layouts), words))
    return found


def _decode_items(use: ServiceLoad, layouts: Layouts, best: Choice) -> list[CostItem]:
    """Return the cost items of one decoded token: the items of a step divided by the accepted tokens per step."""
    items = decode_items(use.setting, layouts, float(best.batch), use.kv_tokens)
    return [item.times(1 / use.setting.drafts.accepted) for item in items]


def _changes(setting: Setting, best: Choice) -> Iterator[tuple[str, dict[str, int | str], bool]]:
    """Yield each possible change: its name, the changed layout, and whether this layout uses HOP-B."""
    layout, heads = best.layout, setting.model.fewest_heads
    dp, of_group, tpa, pp = (int(layout[name]) for name in ("dp", "kvp", "tpa", "pp"))
    kvp, hop_b = dp * of_group, best.strategy in OVERLAPPED
    num_ranks = kvp * tpa
    striped: dict[str, int | str] = layout | {"dp": 1, "kvp": kvp, "ffn_replicas": 1, "placement": "striped"}
    helix_ffn: dict[str, int | str] = {"tpf": num_ranks, "ep": 1}
    if hop_b:
        yield "no HOP-B", layout, False
    if kvp > 1 and num_ranks <= heads.num_query_heads:
        yield "TP only", striped | helix_ffn | {"kvp": 1, "tpa": num_ranks}, False
    if dp > 1:
        yield "one group of KVP ranks", striped, hop_b
    elif kvp > 2 and kvp % 2 == 0 and layout["placement"] == "striped" and layout["ffn_replicas"] == 1:
        yield "two groups of KVP ranks (DP x KVP)", layout | {"dp": 2, "kvp": kvp // 2}, hop_b
    if kvp > 1 and layout["placement"] == "striped" and layout["ffn_replicas"] == 1:
        yield "FFN tied to TPA (Medha)", striped | {"tpf": tpa, "ep": 1, "ffn_replicas": kvp}, False
    if kvp > 1 and layout["placement"] == "striped":
        yield "DP attention", striped | helix_ffn | {"placement": "local"}, False
    if layout["placement"] == "local" or kvp == 1:
        wide = num_ranks // min(tpa, heads.num_kv_heads)
        if wide > 1:
            yield "KV sharded (Helix)", striped | helix_ffn | {"kvp": wide, "tpa": num_ranks // wide}, True
    if of_group % 2 == 0 and pp * 2 <= setting.model.num_layers:
        halved = striped | {"dp": dp, "kvp": of_group // 2, "pp": pp * 2, "tpf": num_ranks // 2, "ep": 1}
        yield "PP doubled, KVP halved", halved, hop_b
    if of_group % 2 == 0 and 2 * tpa <= heads.num_query_heads:
        yield "TPA doubled, KVP halved", striped | helix_ffn | {"dp": dp, "kvp": of_group // 2, "tpa": 2 * tpa}, hop_b


def _short(setting: Setting, layouts: Layouts, needed: Memory) -> str:
    """Describe how much memory the fullest GPU lacks. The result is empty if everything fits."""
    total, held = float(needed.total_bytes[0]), float(setting.capacity_bytes(layouts)[0])
    if total <= held:
        return ""
    weights, kv = float(needed.weights_bytes[0]), float(needed.kv_bytes[0])
    return (
        f"needs {total / 1e9:.1f} GB per GPU, has {held / 1e9:.1f}: short by {(total - held) / 1e9:.1f} GB "
        f"(weights {weights / 1e9:.1f}, KV {kv / 1e9:.1f}, rest {(total - weights - kv) / 1e9:.1f})"
    )


def _difference(own: list[CostItem], other: list[CostItem]) -> str:
    """Describe the two cost items that grow most compared with the best layout, and their additional bytes."""
    ours = {item.name: item for item in own}
    longer = sorted(other, key=lambda item: -_more(item, ours))[:2]
    words = [_compared(item, ours.get(item.name)) for item in longer if _more(item, ours) > 0]
    return "; ".join(words) or "no cost item takes longer"


def _more(item: CostItem, ours: dict[str, CostItem]) -> float:
    return float(item.seconds[0]) - (float(ours[item.name].seconds[0]) if item.name in ours else 0.0)


def _compared(item: CostItem, own: CostItem | None) -> str:
    before_s = 0.0 if own is None else float(own.seconds[0])
    words = f"{item.name} {1e3 * float(item.seconds[0]):.2f} ms vs {1e3 * before_s:.2f}"
    for what, unit in (("hbm_bytes", "read"), ("net_bytes", "sent")):
        bytes_, before = float(getattr(item, what)[0]), 0.0 if own is None else float(getattr(own, what)[0])
        if bytes_ > 1.05 * before and bytes_ > 1e3:
            words += f" ({bytes_ / 1e9:.3g} GB {unit} vs {before / 1e9:.3g})"
    return words
