"""Time to first token: chunks under TP, KVP and SPP, adaptive chunks, and ring attention as the baseline."""

from dataclasses import dataclass, replace

import numpy as np

from longhelix.perf import collectives
from longhelix.perf.attention import attention_items
from longhelix.perf.cost_item import total_seconds
from longhelix.perf.ffn import dense_items, moe_items
from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.setting import Setting
from longhelix.perf.step import cycle_seconds, step_seconds
from longhelix.request import NO_WORK, Work

# Chunk times are piecewise linear in the prefix: a sum over thousands of chunks is taken at so many of them.
_NODES = 16
ADAPTIVE_CHUNKS = tuple(2**power for power in range(5, 14))


@dataclass(frozen=True)
class Prefill:
    """A prompt in chunks. seconds: from its first chunk to its first new token; busy_s: of these each stage has one of
    its chunks; longest_s: the longest step among them."""

    seconds: Array
    busy_s: Array
    longest_s: Array


def prefill(
    setting: Setting,
    layouts: Layouts,
    tokens: float | Array,
    chunk: float | Array,
    *,
    prefix: float | Array = 0.0,
    beside: Work = NO_WORK,
    nodes: int = _NODES,
) -> Prefill:
    """`tokens` after `prefix` others, in chunks of `chunk` rows or a little less, each with the decodes `beside` it.

    With PP stages a chunk enters the first stage as soon as the one before has left it (sequence pipeline parallelism,
    arXiv 2409.17264, section 4.3): of n chunks that take t_i in each of p stages the last is through after
    sum(t_i) + (p - 1) max(t_i), where t_i is the slowest stage's. The sum is taken at `nodes` of them.
    """
    chunks = np.ceil(tokens / np.asarray(chunk, dtype=np.float64))
    rows = tokens / chunks
    before = prefix + rows * (np.multiply.outer((np.arange(nodes) + 0.5) / nodes, np.atleast_1d(chunks)) - 0.5)
    paths_s = cycle_seconds(setting, layouts, layouts.chunk(np.atleast_1d(rows), before) + beside)
    # One by one, so that a layout's time does not depend on how many others there are.
    busy_s: Array = sum(paths_s, layouts.zeros) * chunks / nodes / layouts.pp
    longest_s: Array = paths_s.max(axis=0)
    fill_s = (layouts.pp - 1) * longest_s / layouts.pp
    return Prefill(busy_s + fill_s + _first_token_seconds(setting, layouts), busy_s, longest_s)


def prefill_seconds(setting: Setting, layouts: Layouts, tokens: float | Array, chunk: float | Array) -> Array:
    """Seconds from the first chunk of `tokens`, alone on a system, to the first new token."""
    return prefill(setting, layouts, tokens, chunk).seconds


def _first_token_seconds(setting: Setting, layouts: Layouts) -> Array:
    """What the last row's logits and sampling add to a chunk."""
    rows = layouts.chunk(1.0, 0.0)
    sampled = rows._replace(sampled_rows=1.0)
    return step_seconds(setting, layouts, sampled) - step_seconds(setting, layouts, rows)


@dataclass(frozen=True)
class AdaptivePrefill:
    """A prefill whose chunks shrink: seconds (n,), and at each prefix (nodes,) the chunk and the step's seconds."""

    seconds: Array
    prefixes: Array
    chunks: Array
    steps_s: Array


def adaptive_prefill(
    setting: Setting, layouts: Layouts, tokens: float, target_s: float, beside: Work = NO_WORK, *, nodes: int = 64
) -> AdaptivePrefill:
    """At every prefix the largest chunk of ADAPTIVE_CHUNKS whose step, with the decodes `beside` it, takes `target_s`.

    Where none does, the smallest (arXiv 2409.17264, section 4.2).
    """
    prefixes = (np.arange(nodes) + 0.5) / nodes * tokens
    chunks = np.array(ADAPTIVE_CHUNKS, dtype=np.float64)
    works = layouts.chunk(chunks[:, None, None], prefixes[:, None])
    steps_s = cycle_seconds(setting, layouts, works + beside)  # by chunk, prefix and layout
    # The largest that fits, or the first.
    largest = np.where(steps_s <= target_s, np.arange(len(chunks))[:, None, None], 0).max(axis=0)
    chosen, taken_s = chunks[largest], np.take_along_axis(steps_s, largest[None], axis=0)[0]
    total_s, longest_s = sum(taken_s / chosen, layouts.zeros) * (tokens / nodes), taken_s.max(axis=0)
    seconds = (total_s + (layouts.pp - 1) * longest_s) / layouts.pp + _first_token_seconds(setting, layouts)
    return AdaptivePrefill(seconds, prefixes, chosen, taken_s)


def ring_seconds(setting: Setting, layouts: Layouts, tokens: float, *, striped: bool) -> Array:
    """Prefill in one piece by ring attention: KVP ranks hold n/p tokens each and pass KV around while they attend.

    In each of p rounds a rank attends to n/p keys and receives the next ones. In ring order the slowest rank's keys
    are all before its queries; striped, half of the pairs fall to the causal mask on every rank (arXiv 2311.09431).
    Layers run on n/p rows, the FFN at TP = TPA, and all attend to everything.
    """
    ranks, rows = layouts.kvp, tokens / layouts.kvp
    alone = replace(layouts, kvp=layouts.ones, tpf=layouts.tpa, ep=layouts.ones,
                    ffn_replicas=layouts.ones, hop_b=np.zeros_like(layouts.hop_b))  # fmt: skip
    pairs = rows * rows * (0.5 if striped else 1.0)
    own = attention_items(setting, alone, Work(chunk_rows=rows, chunk_kv_tokens=rows, chunk_pairs=pairs))
    attend_s = next(item.seconds for item in own if item.name == "attention")
    model = setting.model
    token_bytes = layouts.kv_heads(setting.heads) * setting.kv_head_bytes
    passed = collectives.send(setting.system, layouts.tpa, rows * token_bytes)
    rounds_s = attend_s + (ranks - 1) * np.maximum(attend_s, passed.seconds)
    ffn = (moe_items if model.moe else dense_items)(setting, alone, Work(chunk_rows=rows))
    layer_s = total_seconds([*own, *ffn]) - attend_s + rounds_s
    return model.num_layers * layer_s + _first_token_seconds(setting, alone)
