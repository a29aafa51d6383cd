"""Prefills of Medha's figures that no plan has: adaptive chunks, and ring attention as the baseline."""

from dataclasses import dataclass, replace

import numpy as np

from longhelix.perf import collectives
from longhelix.perf.attention import attention_items
from longhelix.perf.cost_item import total_seconds
from longhelix.perf.ffn import dense_items, moe_items
from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.prefill import first_token_seconds
from longhelix.perf.setting import Setting
from longhelix.perf.step import cycle_seconds
from longhelix.scheduler.work import NO_WORK, Work

ADAPTIVE_CHUNKS = tuple(2**power for power in range(5, 14))


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
    seconds = (total_s + (layouts.pp - 1) * longest_s) / layouts.pp + first_token_seconds(setting, layouts)
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
    return model.num_layers * layer_s + first_token_seconds(setting, alone)
