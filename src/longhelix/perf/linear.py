"""Layers with linear attention (Gated DeltaNet): a state of each request, cut by heads and never along the sequence."""

import numpy as np

from longhelix.perf import collectives, weights
from longhelix.perf.collectives import RankGroups
from longhelix.perf.cost_item import CostItem, kernels, product, sends
from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.setting import ACTIVATION_BYTES, STATE_BYTES, Setting
from longhelix.perf.stored_layers import StoredWeights
from longhelix.scheduler.work import Work
from longhelix.spec import LinearAttention

_KERNELS = 3.0  # the convolution, the delta rule, the gated norm


def linear_items(
    setting: Setting, layouts: Layouts, linear: LinearAttention, stored: StoredWeights, work: Work
) -> list[CostItem]:
    """One layer's cost items, in order.

    Heads lie over the ranks that sum the output projection: the KVP x TPA of a group, which have all of its rows, or
    TPA where a KVP rank has an FFN of its own. A decode row reads and writes its request's state, a prompt's
    chunk one state.
    """
    rank_work = layouts.of_rank(work, setting.request_rows)
    keys, values = rank_heads(layouts, linear)
    inputs = weights.linear_inputs(setting, layouts, stored)
    outputs = weights.linear_output(setting, layouts, stored)
    states = rank_work.decode_rows + np.minimum(rank_work.chunk_rows, 1.0)
    moved = keys * 2 * linear.key_size + values * 3 * linear.value_size  # queries, keys; values, gates, outputs
    hidden_bytes = rank_work.rows * setting.model.hidden_size * ACTIVATION_BYTES
    groups = RankGroups(layouts.output_ranks, layouts.ones)
    summed = collectives.all_reduce(setting.system, groups, hidden_bytes + layouts.zeros)
    return [
        product("linear projections", setting, layouts, inputs, rank_work.rows, count=2.0),
        kernels(
            "linear attention",
            setting,
            layouts,
            flops=values * (rank_work.decode_rows * linear.row_flops + rank_work.chunk_rows * linear.chunk_row_flops),
            hbm_bytes=2 * states * request_bytes(layouts, linear) + rank_work.rows * moved * ACTIVATION_BYTES,
            count=_KERNELS,
            compute_efficiency=setting.system.arithmetic.attention_efficiency,
        ),
        product("output projection", setting, layouts, outputs, rank_work.rows, count=1.0),
        sends("all-reduce after attention", summed.seconds, summed.net_bytes, summed.fixed_s),
    ]


def rank_heads(layouts: Layouts, linear: LinearAttention) -> tuple[Array, Array]:
    """Key and value heads of the fullest rank; where there are more ranks than heads, several have the same."""
    ranks = layouts.output_ranks
    return np.ceil(linear.num_key_heads / ranks), np.ceil(linear.num_value_heads / ranks)


def request_bytes(layouts: Layouts, linear: LinearAttention) -> Array:
    """What one layer keeps of one request on the fullest rank, however long it is: the states, and the tokens that the
    next convolution needs."""
    keys, values = rank_heads(layouts, linear)
    channels = keys * 2 * linear.key_size + values * linear.value_size
    states = values * linear.key_size * linear.value_size
    return states * STATE_BYTES + channels * (linear.kernel_size - 1) * ACTIVATION_BYTES
