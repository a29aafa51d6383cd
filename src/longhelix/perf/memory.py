"""Bytes on the fullest rank: weights, KV, what a step needs beside them."""

from dataclasses import dataclass

import numpy as np

from longhelix.perf import weights
from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.linear import held_heads, request_bytes
from longhelix.perf.setting import ACTIVATION_BYTES, LOGIT_BYTES, Setting
from longhelix.scheduler.config import SchedulerConfig
from longhelix.scheduler.kv.windows import span_blocks


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank, arrays over layouts."""

    weights_bytes: Array
    kv_bytes: Array
    activations_bytes: Array

    @property
    def total_bytes(self) -> Array:
        return self.weights_bytes + self.kv_bytes + self.activations_bytes


def memory(
    setting: Setting, layouts: Layouts, batch: float | Array, context: float | Array, chunk: float | Array = 0.0
) -> Memory:
    """With `batch` requests of `context` tokens each, and a prefill chunk of `chunk` rows at a time."""
    decode_rows = np.ceil(batch / layouts.pp) * setting.request_rows
    return Memory(
        weights_bytes=weights_bytes(setting, layouts),
        kv_bytes=kv_bytes(setting, layouts, batch, context),
        activations_bytes=_activations_bytes(setting, layouts, decode_rows + chunk, decode_rows),
    )


def weights_bytes(setting: Setting, layouts: Layouts) -> Array:
    """All weights that a rank holds: its share of a stage's layers, and of the embedding or the head."""
    model = setting.model
    stage_layers = layouts.stage_layers(model.num_layers)
    num_moe = setting.most_expert_layers[stage_layers.astype(np.intp)]
    experts = num_moe * weights.all_experts(setting, layouts)
    others = num_moe * weights.expert_layer(setting, layouts) - experts
    others = others + (stage_layers - num_moe) * weights.dense_layer(setting, layouts)
    if model.linear is not None:
        num_linear = stage_layers - setting.most_full_layers[stage_layers.astype(np.intp)]
        more = weights.linear_layer(setting, layouts) - weights.expert_layer(setting, layouts)
        others = others + num_linear * more
    ends = np.where((layouts.pp > 1) | np.bool_(model.tied_embeddings), 1.0, 2.0)
    others = others + ends * weights.vocabulary(setting, layouts)
    return np.asarray(others * setting.weight_bytes + experts * setting.expert_bytes)


def kv_bytes(setting: Setting, layouts: Layouts, batch: float | Array, context: float | Array) -> Array:
    """KV of a stage's layers, and the states of those with linear attention, of every request of the rank's group."""
    kept, linear = token_bytes(setting, layouts, batch, context), setting.model.linear
    if linear is None:
        return kept
    layers = layouts.stage_layers(setting.model.num_layers)
    num_linear = layers - setting.most_full_layers[layers.astype(np.intp)]
    return np.asarray(kept + np.ceil(batch / layouts.dp) * request_bytes(layouts, linear) * num_linear)


def token_bytes(setting: Setting, layouts: Layouts, batch: float | Array, context: float | Array) -> Array:
    """KV of a stage's layers: a share of the tokens of every request of the rank's group; of a layer with a window no
    more tokens than the engine promises a request, of one with linear attention none."""
    requests = np.ceil(batch / layouts.dp) / layouts.kvp
    full_bytes, window_bytes = layer_bytes(setting, layouts)
    kept = requests * context * full_bytes
    if not setting.model.views:
        return np.asarray(kept)
    window_tokens = span_blocks(setting.model.views[0], SchedulerConfig.block_tokens) * SchedulerConfig.block_tokens
    return np.asarray(kept + requests * np.minimum(context, window_tokens) * window_bytes)


def windows_bytes(setting: Setting, layouts: Layouts, batch: float | Array, context: float | Array) -> Array:
    """Of `token_bytes` those of layers with a window."""
    full_bytes, _ = layer_bytes(setting, layouts)
    requests = np.ceil(batch / layouts.dp) / layouts.kvp
    return np.asarray(token_bytes(setting, layouts, batch, context) - requests * context * full_bytes)


def layer_bytes(setting: Setting, layouts: Layouts) -> tuple[Array, Array]:
    """KV of one token in a stage's layers that see everything, and in those with a window."""
    one_bytes = layouts.kv_heads(setting.heads) * setting.kv_head_bytes + setting.index_bytes
    layers = layouts.stage_layers(setting.model.num_layers)
    full = setting.most_full_layers[layers.astype(np.intp)]
    windowed = layers - full if setting.model.views else np.zeros_like(layers)
    return np.asarray(one_bytes * full), np.asarray(one_bytes * windowed)


def _activations_bytes(setting: Setting, layouts: Layouts, rows: Array, sampled_rows: Array) -> Array:
    """Hidden states twice, the widest pair of one layer's inputs and outputs, exchange buffers, logits."""
    model, heads = setting.model, setting.heads
    num_query_heads = layouts.query_heads(heads)
    projected = model.head_size * (num_query_heads + 2 * layouts.kv_heads(heads))
    exchanged = 2 * num_query_heads * (model.mla.kv_lora_rank if model.mla else model.head_size)
    columns = 2 * np.ceil(model.ffn_size / layouts.ffn_ranks)
    if model.moe is not None:
        columns = np.maximum(columns, 2 * model.moe.experts_per_token * np.ceil(model.moe.expert_size / layouts.tpf))
    widest = np.maximum(projected + exchanged, columns + model.hidden_size)
    if model.linear is not None:
        keys, values = held_heads(layouts, model.linear)
        widest = np.maximum(widest, 2 * (keys * model.linear.key_size + values * model.linear.value_size))
    logits_bytes = sampled_rows * np.ceil(model.vocab_size / layouts.ffn_ranks) * LOGIT_BYTES
    return np.asarray(rows * (2 * model.hidden_size + widest) * ACTIVATION_BYTES + logits_bytes)
