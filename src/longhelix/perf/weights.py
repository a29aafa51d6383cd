"""Numbers in the matrices of a layer on the fullest rank of each layout (`Setting.held`).

Products' costs and memory follow from them.

Read off the table of weights. Vectors, norms and biases, count for nothing.
"""

from collections.abc import Iterable

import numpy as np

from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.setting import Setting
from longhelix.spec.weights import Dim, Split, WeightSpec, embedding


def dense_layer(setting: Setting, layouts: Layouts) -> Array:
    """All that a rank holds of a layer without experts."""
    return _numbers(setting, layouts, setting.dense_layer)


def expert_layer(setting: Setting, layouts: Layouts) -> Array:
    """All that a rank holds of a layer with experts."""
    return _numbers(setting, layouts, setting.expert_layer)


def qkv(setting: Setting, layouts: Layouts) -> Array:
    """Wq, Wk, Wv over TPA, the same on every KVP rank. MLA: down-projections, whole, and the queries' up-projection."""
    return _named(setting, layouts, "qkv", "latent_down", "query_up")


def key_absorption(setting: Setting, layouts: Layouts) -> Array:
    """MLA: the half of the latents' up-projection that turns queries into latents, over TPA (none otherwise)."""
    mla = setting.model.mla
    return setting.query_heads(layouts) * (mla.nope_size * mla.kv_lora_rank if mla else 0.0)


def value_projection(setting: Setting, num_heads: Array) -> Array:
    """MLA: the half that turns latent outputs of `num_heads` into values (none otherwise)."""
    mla = setting.model.mla
    return num_heads * (mla.value_size * mla.kv_lora_rank if mla else 0.0)


def output_projection(setting: Setting, layouts: Layouts) -> Array:
    """Wo: rows over all ranks that share a request, or over TPA beside a copy of the FFN."""
    return _named(setting, layouts, "output")


def dense_ffn(setting: Setting, layouts: Layouts) -> Array:
    """Gate, up and down, columns over all ranks of an FFN."""
    return _named(setting, layouts, "gate_up", "down")


def all_experts(setting: Setting, layouts: Layouts) -> Array:
    """Gate, up and down of all routed experts that a rank holds of a layer (none without experts)."""
    return _named(setting, layouts, *_EXPERT)


def expert(setting: Setting, layouts: Layouts) -> Array:
    """One expert's gate, up and down, columns over TPF."""
    return all_experts(setting, layouts) / num_experts(setting, layouts)


def num_experts(setting: Setting, layouts: Layouts) -> Array:
    """Experts of the fullest rank."""
    moe = setting.model.moe
    assert moe is not None
    return _pieces(moe.num_experts, layouts.ep, setting, layouts)


def shared_experts(setting: Setting, layouts: Layouts) -> Array:
    """All shared experts, columns over all ranks of an FFN; whole on each where groups have requests of their own."""
    return _named(setting, layouts, "shared.gate_up", "shared.down")


def router(setting: Setting, layouts: Layouts) -> Array:
    return _named(setting, layouts, "router")


def indexer(setting: Setting, layouts: Layouts) -> Array:
    """An indexer's queries, key and weights of its heads, whole on every rank."""
    return _named(setting, layouts, "index_queries", "index_key", "index_heads")


def linear_layer(setting: Setting, layouts: Layouts) -> Array:
    """All that a rank holds of a layer with linear attention."""
    return _numbers(setting, layouts, setting.linear_layer)


def linear_inputs(setting: Setting, layouts: Layouts) -> Array:
    """Linear attention's queries, keys, values, gates and rates."""
    return _named(setting, layouts, "linear_in")


def linear_output(setting: Setting, layouts: Layouts) -> Array:
    return _named(setting, layouts, "linear_out")


def vocabulary(setting: Setting, layouts: Layouts) -> Array:
    """The embedding, or the LM head: rows over all ranks of an FFN."""
    return _numbers(setting, layouts, [embedding(setting.model)])


_EXPERT = ("experts.{}.gate_up", "experts.{}.down")


def _named(setting: Setting, layouts: Layouts, *names: str) -> Array:
    """Those of these names in a layer that has any."""
    layers = (setting.dense_layer, setting.expert_layer, setting.linear_layer)
    layer = next((layer for layer in layers if any(weight.name in names for weight in layer)), ())
    return _numbers(setting, layouts, (weight for weight in layer if weight.name in names))


def _numbers(setting: Setting, layouts: Layouts, weights: Iterable[WeightSpec]) -> Array:
    total = layouts.zeros
    for weight in weights:
        if weight.columns is not None:
            dims = (weight.experts, weight.rows, weight.columns)
            experts, rows, columns = (_held(dim, setting, layouts) * dim.unit for dim in dims)
            total = total + experts * rows * columns
    return total


def _held(dim: Dim, setting: Setting, layouts: Layouts) -> float | Array:
    """Those of a dim that a rank has; the fullest one's are integers, and so are all sums of products of them,
    exactly."""
    match dim.split:
        case Split.WHOLE:
            return float(dim.count)
        case Split.QUERY_HEADS:
            return setting.query_heads(layouts)
        case Split.KV_HEADS:
            return setting.kv_heads(layouts)
        case Split.OUTPUT_HEADS:
            return setting.merged_query_heads(layouts)
        case Split.LINEAR_HEADS:
            return _pieces(dim.count, layouts.output_ranks, setting, layouts)
        case Split.FFN_COLUMNS | Split.VOCABULARY:
            return _pieces(dim.count, layouts.ffn_ranks, setting, layouts)
        case Split.SHARED_COLUMNS:
            return _pieces(dim.count, np.where(layouts.grouped, 1.0, layouts.ffn_ranks), setting, layouts)
        case Split.EXPERT_COLUMNS:
            return _pieces(dim.count, layouts.tpf, setting, layouts)
        case Split.EXPERTS:
            return _pieces(dim.count, layouts.ep, setting, layouts)


def _pieces(count: int, ranks: Array, setting: Setting, layouts: Layouts) -> Array:
    return setting.held(layouts, np.ceil(count / ranks), count / ranks)
