"""Bytes of memory on the fullest rank: weights, KV, and activations."""

from dataclasses import dataclass

import numpy as np

from longhelix.perf import weights
from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.linear import rank_heads, request_bytes
from longhelix.perf.setting import ACTIVATION_BYTES, LOGIT_BYTES, Setting
from longhelix.perf.stored_layers import StoredWeights
from longhelix.scheduler.config import SchedulerConfig
from longhelix.scheduler.kv.windows import span_blocks
from longhelix.spec import LinearAttention
from longhelix.spec.ffn import MLP
from longhelix.spec.layer import FFN, Mixer
from longhelix.spec.moe import MoE
from longhelix.spec.weights import shares_embedding


@dataclass(frozen=True)
class Memory:
    """Bytes of memory on the fullest rank. Fields are arrays over layouts."""

    weights_bytes: Array
    kv_bytes: Array
    activations_bytes: Array

    @property
    def total_bytes(self) -> Array:
        return self.weights_bytes + self.kv_bytes + self.activations_bytes


def memory(
    setting: Setting, layouts: Layouts, batch: float | Array, context: float | Array, chunk: float | Array = 0.0
) -> Memory:
    """Return the memory for `batch` requests of `context` tokens each, and a prefill chunk of `chunk` rows."""
    decode_rows = np.ceil(batch / layouts.pp) * setting.request_rows
    return Memory(
        weights_bytes=weights_bytes(setting, layouts),
        kv_bytes=kv_bytes(setting, layouts, batch, context),
        activations_bytes=_activations_bytes(setting, layouts, decode_rows + chunk, decode_rows),
    )


def weights_bytes(setting: Setting, layouts: Layouts) -> Array:
    """Return bytes of a rank's weights: its share of a stage's layers, and of the embedding or the head."""
    model = setting.model
    stored = setting.stored
    layers = {layer: _bytes(setting, layouts, layer.weights) for layer in setting.layers.kinds}
    first_bytes = _bytes(setting, layouts, stored.embedding)
    last_bytes = _bytes(setting, layouts, (*stored.head, *stored.last_norm))
    one_bytes = last_bytes if shares_embedding(model) else first_bytes + last_bytes
    ends_bytes = np.where(layouts.pp > 1, np.maximum(first_bytes, last_bytes), one_bytes)
    return np.asarray(setting.layers.largest_total(layers, layouts.stage_layers(model.num_layers)) + ends_bytes)


def _bytes(setting: Setting, layouts: Layouts, stored: StoredWeights) -> Array:
    """Return bytes of a rank's share of these weights."""
    return sum((amount.bytes for amount in weights.all_of(setting, layouts, stored)), layouts.zeros)


def kv_bytes(setting: Setting, layouts: Layouts, batch: float | Array, context: float | Array) -> Array:
    """Return bytes of KV and of linear attention's states in a stage's layers, for the rank's group of requests."""
    requests = np.ceil(batch / layouts.dp)
    states_bytes = sum(
        (
            requests * request_bytes(layouts, mixer.spec) * counts
            for mixers, counts in setting.mixers_of_stages(layouts)
            for mixer in mixers
            if isinstance(mixer.spec, LinearAttention)
        ),
        layouts.zeros,
    )
    return np.asarray(token_bytes(setting, layouts, batch, context) + states_bytes)


def token_bytes(setting: Setting, layouts: Layouts, batch: float | Array, context: float | Array) -> Array:
    """Return bytes of KV in a stage's layers, for a share of the tokens of all requests of the rank's group.

    A layer with a window keeps only the tokens that the engine reserves for a request. Linear attention keeps none.
    """
    requests = np.ceil(batch / layouts.dp) / layouts.kvp
    kept = requests * context * layer_bytes(setting, layouts)[0]
    return np.asarray(kept + windows_bytes(setting, layouts, batch, context))


def windows_bytes(setting: Setting, layouts: Layouts, batch: float | Array, context: float | Array) -> Array:
    """Return the part of `token_bytes` in layers with a window."""
    requests, block_tokens = np.ceil(batch / layouts.dp) / layouts.kvp, SchedulerConfig.block_tokens
    kept = layouts.zeros
    for view, view_bytes in zip(setting.model.views, layer_bytes(setting, layouts)[1:], strict=True):
        tokens = np.minimum(context, span_blocks(view, block_tokens) * block_tokens)
        kept = kept + requests * tokens * view_bytes
    return np.asarray(kept)


def layer_bytes(setting: Setting, layouts: Layouts) -> list[Array]:
    """Return bytes of KV of one token in a stage's layers, by KV group (`ModelSpec.group_of`)."""
    groups = [layouts.zeros for _ in range(1 + len(setting.model.views))]
    for mixers, counts in setting.mixers_of_stages(layouts):
        for mixer in mixers:
            if not isinstance(mixer.spec, LinearAttention):
                group = setting.model.group_of_view(mixer.spec.visibility)
                groups[group] = groups[group] + counts * setting.token_bytes(layouts, mixer.spec)
    return groups


def _activations_bytes(setting: Setting, layouts: Layouts, rows: Array, sampled_rows: Array) -> Array:
    """Return bytes of activations: two hidden states, the widest inputs and outputs of a layer, and logits."""
    model, widest = setting.model, layouts.zeros
    for part in setting.parts:
        widest = np.maximum(widest, _width(setting, layouts, part))
    logits_bytes = sampled_rows * np.ceil(model.vocabulary.size / layouts.ffn_ranks) * LOGIT_BYTES
    return np.asarray(rows * (2 * model.hidden_size + widest) * ACTIVATION_BYTES + logits_bytes)


def _width(setting: Setting, layouts: Layouts, part: Mixer | FFN) -> Array:
    """Return how many numbers a mixer or an FFN needs at once for a row."""
    match part:
        case MLP():
            columns = part.activation.projections * np.ceil(part.num_columns / layouts.ffn_ranks)
            return columns + setting.model.hidden_size
        case MoE():
            taken = part.experts_per_token * np.ceil(part.expert_size / layouts.tpf)
            columns = part.activation.projections * taken
            return columns + setting.model.hidden_size
        case LinearAttention():
            keys, values = rank_heads(layouts, part)
            return 2 * (keys * part.key_size + values * part.value_size)
    num_query_heads = layouts.query_heads(part.heads)
    projected = part.head_size * (num_query_heads + 2 * layouts.kv_heads(part.heads))
    return projected + 2 * num_query_heads * part.cache_entry.value_size
