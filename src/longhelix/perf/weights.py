"""Numbers in the matrices of a layer's parts on the fullest rank of each layout (`Setting.priced_amount`).

They come from the table of weights, and determine memory and the costs of products. Norms and biases are ignored.
"""

from collections.abc import Iterable

import numpy as np

from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.setting import Setting
from longhelix.spec import LinearAttention
from longhelix.spec.attention import MultiHeadLatentAttention
from longhelix.spec.ffn import MLP
from longhelix.spec.layer import FFN, Attention, Mixer
from longhelix.spec.moe import MoE
from longhelix.spec.weights import Dim, Split, WeightSpec, embedding


def all_of(setting: Setting, layouts: Layouts, part: Mixer | FFN) -> Array:
    """Return all numbers of a mixer or an FFN on a rank."""
    return _numbers(setting, layouts, setting.weights[part])


def qkv(setting: Setting, layouts: Layouts, attention: Attention) -> Array:
    """Wq, Wk, Wv over TPA, the same on every KVP rank. MLA: down-projections, whole, and the queries' up-projection."""
    return _named(setting, layouts, attention, "qkv", "latent_down", "query_up")


def key_absorption(setting: Setting, layouts: Layouts, attention: MultiHeadLatentAttention) -> Array:
    """The half of the latents' up-projection that turns queries into latents, over TPA."""
    latents = attention.latents
    return setting.query_heads(layouts, attention.heads) * (latents.nope_size * latents.kv_lora_rank)


def value_projection(attention: MultiHeadLatentAttention, num_heads: Array) -> Array:
    """The half that turns latent outputs of `num_heads` into values."""
    return num_heads * (attention.latents.value_size * attention.latents.kv_lora_rank)


def output_projection(setting: Setting, layouts: Layouts, attention: Attention) -> Array:
    """Wo: rows over all ranks that share a request, or over TPA beside a copy of the FFN."""
    return _named(setting, layouts, attention, "output")


def dense_ffn(setting: Setting, layouts: Layouts, ffn: MLP) -> Array:
    """Gate, up and down, columns over all ranks of an FFN."""
    return _named(setting, layouts, ffn, "gate_up", "down")


def all_experts(setting: Setting, layouts: Layouts, moe: MoE) -> Array:
    """Gate, up and down of all routed experts that a rank holds of a layer."""
    return _named(setting, layouts, moe, "experts.{}.gate_up", "experts.{}.down")


def expert(setting: Setting, layouts: Layouts, moe: MoE) -> Array:
    """One expert's gate, up and down, columns over TPF."""
    return all_experts(setting, layouts, moe) / num_experts(setting, layouts, moe)


def num_experts(setting: Setting, layouts: Layouts, moe: MoE) -> Array:
    """Experts of the fullest rank."""
    return _pieces(moe.num_experts, layouts.ep, setting, layouts)


def shared_experts(setting: Setting, layouts: Layouts, moe: MoE) -> Array:
    """All shared experts: columns over all ranks of an FFN, or whole on each if groups have their own requests."""
    return _named(setting, layouts, moe, "shared.gate_up", "shared.down")


def router(setting: Setting, layouts: Layouts, moe: MoE) -> Array:
    return _named(setting, layouts, moe, "router")


def indexer(setting: Setting, layouts: Layouts, attention: Attention) -> Array:
    """An indexer's queries, key and weights of its heads, whole on every rank."""
    return _named(setting, layouts, attention, "index_queries", "index_key", "index_heads")


def linear_inputs(setting: Setting, layouts: Layouts, linear: LinearAttention) -> Array:
    """Linear attention's queries, keys, values, gates and rates."""
    return _named(setting, layouts, linear, "linear_in")


def linear_output(setting: Setting, layouts: Layouts, linear: LinearAttention) -> Array:
    return _named(setting, layouts, linear, "linear_out")


def vocabulary(setting: Setting, layouts: Layouts) -> Array:
    """The embedding, or the LM head: rows over all ranks of an FFN."""
    return _numbers(setting, layouts, [embedding(setting.model)])


def _named(setting: Setting, layouts: Layouts, part: Mixer | FFN, *names: str) -> Array:
    """Return the numbers of the weights with these names."""
    return _numbers(setting, layouts, (weight for weight in setting.weights[part] if weight.name in names))


def _numbers(setting: Setting, layouts: Layouts, weights: Iterable[WeightSpec]) -> Array:
    total = layouts.zeros
    for weight in weights:
        if weight.columns is not None:
            dims = (weight.experts, weight.rows, weight.columns)
            experts, rows, columns = (_owned_items(dim, setting, layouts) * dim.unit for dim in dims)
            total = total + experts * rows * columns
    return total


def _owned_items(dim: Dim, setting: Setting, layouts: Layouts) -> float | Array:
    """Return how many items of a dim a rank has. The fullest rank's are integers, so sums of products are exact."""
    match dim.split:
        case Split.WHOLE:
            return float(dim.count)
        case Split.QUERY_HEADS:
            return setting.query_heads(layouts, dim.all_heads)
        case Split.KV_HEADS:
            return setting.kv_heads(layouts, dim.all_heads)
        case Split.OUTPUT_HEADS:
            return setting.merged_query_heads(layouts, dim.all_heads)
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
    return setting.priced_amount(layouts, np.ceil(count / ranks), count / ranks)
