"""Numbers in a layer's weights on the fullest rank of each layout; the products' costs and the memory follow."""

import numpy as np

from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.setting import Setting


def qkv(setting: Setting, layouts: Layouts) -> Array:
    """Wq, Wk, Wv over TPA, the same on every KVP rank. MLA: down-projections, whole, and the queries' up-projection."""
    model, heads = setting.model, setting.heads
    num_query_heads = layouts.query_heads(heads)
    if model.mla is None:
        return model.hidden_size * model.head_size * (num_query_heads + 2 * layouts.kv_heads(heads))
    down = model.hidden_size * model.mla.cached_size
    if model.mla.q_lora_rank is None:
        return down + model.hidden_size * num_query_heads * model.head_size
    return down + model.mla.q_lora_rank * (model.hidden_size + num_query_heads * model.head_size)


def key_absorption(setting: Setting, layouts: Layouts) -> Array:
    """MLA: what turns queries into latents, over TPA (none otherwise)."""
    mla = setting.model.mla
    return layouts.query_heads(setting.heads) * (mla.nope_size * mla.kv_lora_rank if mla else 0.0)


def value_projection(setting: Setting, num_heads: Array) -> Array:
    """MLA: what turns latent outputs of `num_heads` into values (none otherwise)."""
    mla = setting.model.mla
    return num_heads * (mla.value_size * mla.kv_lora_rank if mla else 0.0)


def output_projection(setting: Setting, layouts: Layouts) -> Array:
    """Wo: rows over all N ranks, or over TPA where a rank keeps all heads of its share."""
    return layouts.merged_query_heads(setting.heads) * setting.output_size * setting.model.hidden_size


def dense_ffn(setting: Setting, layouts: Layouts) -> Array:
    """Gate, up and down, columns over all ranks of an FFN."""
    return 3 * setting.model.hidden_size * np.ceil(setting.model.ffn_size / layouts.ffn_ranks)


def expert(setting: Setting, layouts: Layouts) -> Array:
    """One expert's gate, up and down, columns over TPF."""
    moe = setting.model.moe
    assert moe is not None
    return 3 * setting.model.hidden_size * np.ceil(moe.expert_size / layouts.tpf)


def num_experts(setting: Setting, layouts: Layouts) -> Array:
    """Experts of the fullest rank."""
    moe = setting.model.moe
    assert moe is not None
    return np.ceil(moe.num_experts / layouts.ep)


def shared_experts(setting: Setting, layouts: Layouts) -> Array:
    """All shared experts, columns over all ranks of an FFN; a rank with requests of its own has them whole."""
    moe = setting.model.moe
    assert moe is not None
    ranks = np.where(layouts.local, 1.0, layouts.ffn_ranks)
    return 3 * setting.model.hidden_size * np.ceil(moe.shared_size / ranks)


def router(setting: Setting) -> float:
    moe = setting.model.moe
    assert moe is not None
    return float(setting.model.hidden_size * moe.num_experts)


def vocabulary(setting: Setting, layouts: Layouts) -> Array:
    """The embedding, or the LM head: rows over all ranks of a copy."""
    return np.ceil(setting.model.vocab_size / layouts.ffn_ranks) * setting.model.hidden_size
