"""The FFN half of a layer: dense, or a mixture of experts, with what its ranks send each other."""

import numpy as np

from longhelix.perf import collectives, weights
from longhelix.perf.collectives import RankGroups, Sent
from longhelix.perf.cost_item import CostItem, kernels, product, sends
from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.setting import ACTIVATION_BYTES, Setting
from longhelix.perf.stored_layers import StoredWeights
from longhelix.scheduler.work import Work
from longhelix.spec.layer import FFN
from longhelix.spec.moe import MoE

_BEFORE, _AFTER = "gather before FFN", "all-reduce after FFN"


def ffn_items(setting: Setting, layouts: Layouts, ffn: FFN, stored: StoredWeights, work: Work) -> list[CostItem]:
    """Return the cost items of one layer's FFN. stored: its weights."""
    if isinstance(ffn, MoE):
        return moe_items(setting, layouts, ffn, stored, work)
    return dense_items(setting, layouts, stored, work)


def dense_items(setting: Setting, layouts: Layouts, stored: StoredWeights, work: Work) -> list[CostItem]:
    """Return a dense FFN's cost items. Groups with their own requests gather all rows before it, and scatter sums."""
    amounts = weights.dense_ffn(setting, layouts, stored)
    before, after = _gathered(setting, layouts, work)
    products = product("dense FFN", setting, layouts, amounts, work.rows, count=2.0)
    return [_sent(_BEFORE, before), products, _sent(_AFTER, after)]


def moe_items(setting: Setting, layouts: Layouts, moe: MoE, stored: StoredWeights, work: Work) -> list[CostItem]:
    """Return the cost items of an FFN with experts.

    Rows are gathered as for dense FFNs. With TPF = 1, each row goes to its experts and back instead (all-to-all). Then
    every rank sends a share of its group's rows, and gathers the shares of the other ranks in the end.
    """
    rank_work = layouts.of_rank(work, setting.request_rows)
    (router,) = weights.router(setting, layouts, stored)
    items = [
        kernels(
            "router",
            setting,
            layouts,
            flops=2 * rank_work.rows * router.numbers,
            hbm_bytes=router.numbers * ACTIVATION_BYTES,
            count=2.0,
        )
    ]
    before, after = _gathered(setting, layouts, work)
    dispatched, one_way = layouts.grouped & (layouts.tpf == 1), _dispatched(setting, layouts, moe, rank_work)
    items.append(_sent(_BEFORE, one_way.where(dispatched, before)))
    if moe.shared_size:
        rank_rows: Array = rank_work.rows
        rows = np.where(layouts.grouped, rank_rows, work.rows)
        items.append(
            product(
                "shared experts", setting, layouts, weights.shared_experts(setting, layouts, stored), rows, count=0.0
            )
        )
    items.append(_experts(setting, layouts, moe, stored, work))
    items.append(_sent(_AFTER, (one_way + _regathered(setting, layouts, rank_work)).where(dispatched, after)))
    return items


def fullest(mean: Array, variance: Array, ranks: Array) -> Array:
    """Expected largest of `ranks` numbers with that mean and variance: mean + sqrt(2 ln(ranks) variance)."""
    return mean + np.sqrt(2 * np.log(ranks) * variance)


def _experts(setting: Setting, layouts: Layouts, moe: MoE, stored: StoredWeights, work: Work) -> CostItem:
    """Experts as grouped products: weights of those that some row takes, arithmetic of the fullest rank.

    With uniform routing an expert is taken by any of T rows with probability p = 1 - (1 - k/E)^T.
    """
    num_experts, expert = weights.num_experts(setting, layouts, moe), weights.expert(setting, layouts, moe, stored)
    taken = 1 - (1 - moe.experts_per_token / moe.num_experts) ** (work.rows + layouts.zeros)
    read = np.minimum(num_experts, fullest(num_experts * taken, num_experts * taken * (1 - taken), layouts.ep))
    mean_rows = work.rows * moe.experts_per_token / layouts.ep
    rows = fullest(mean_rows, mean_rows * (1 - 1 / layouts.ep), layouts.ep)
    rows = np.minimum(rows, work.rows * np.minimum(moe.experts_per_token, num_experts))
    return product("experts", setting, layouts, expert, rows, read=[each.times(read) for each in expert], count=3.0)


def _gathered(setting: Setting, layouts: Layouts, work: Work) -> tuple[Sent, Sent]:
    """Before and after an FFN over all its ranks: nothing and an all-reduce; of groups with requests of their own an
    all-gather and a reduce-scatter."""
    system, ones = setting.system, layouts.ones
    hidden_bytes = work.rows * setting.model.hidden_size * ACTIVATION_BYTES + 0 * ones
    gathered = collectives.all_gather(system, RankGroups(layouts.dp, layouts.group_ranks), hidden_bytes)
    scattered = collectives.all_gather(system, RankGroups(layouts.num_ranks, ones), hidden_bytes)
    regathered = _regathered(setting, layouts, layouts.of_rank(work, setting.request_rows))
    summed = collectives.all_reduce(system, RankGroups(layouts.ffn_ranks, ones), hidden_bytes)
    after = (scattered + regathered).where(layouts.grouped, summed)
    return gathered, after


def _regathered(setting: Setting, layouts: Layouts, rank_work: Work) -> Sent:
    """Return the cost of gathering a group's rows on each of its ranks, which have a share each."""
    hidden_bytes = rank_work.rows * setting.model.hidden_size * ACTIVATION_BYTES
    return collectives.all_gather(setting.system, RankGroups(layouts.group_ranks, layouts.ones), hidden_bytes)


def _dispatched(setting: Setting, layouts: Layouts, moe: MoE, rank_work: Work) -> Sent:
    """One way between rows and experts: a row goes once to each rank that has one of its k experts, from one rank of
    its group."""
    targets = layouts.ep * (1 - (1 - 1 / layouts.ep) ** moe.experts_per_token)
    row_bytes = setting.model.hidden_size * ACTIVATION_BYTES
    groups = RankGroups(layouts.ep, layouts.ones)
    rows = np.ceil(rank_work.rows / layouts.group_ranks)
    return collectives.all_to_all(setting.system, groups, rows * row_bytes * targets)


def _sent(name: str, sent: Sent) -> CostItem:
    return sends(name, sent.seconds, sent.net_bytes, sent.fixed_s)
