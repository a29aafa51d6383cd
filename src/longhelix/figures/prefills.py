"""Model prefills that only Medha's figures need: with adaptive chunks, and with ring attention as a baseline."""

from dataclasses import dataclass, replace

import numpy as np

from longhelix.perf import collectives
from longhelix.perf.attention import attention_items
from longhelix.perf.cost_item import total_seconds
from longhelix.perf.ffn import ffn_items
from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.prefill import first_token_seconds
from longhelix.perf.setting import Setting
from longhelix.perf.step import cycle_seconds
from longhelix.scheduler.work import NO_WORK, Work
from longhelix.spec import LinearAttention

ADAPTIVE_CHUNKS = tuple(2**power for power in range(5, 14))


@dataclass(frozen=True)
class AdaptivePrefill:
    """A prefill on n layouts. Its chunks become smaller as the prefix grows."""

    seconds: Array  # TTFT, (n,)
    prefixes: Array  # number of tokens before the chunk at each node, (nodes,)
    chunks: Array  # chunk size at each node, (nodes, n)
    steps_s: Array  # time of the chunk's step at each node, (nodes, n)


def adaptive_prefill(
    setting: Setting, layouts: Layouts, tokens: float, target_s: float, decodes: Work = NO_WORK, *, nodes: int = 64
) -> AdaptivePrefill:
    """Predict a prefill. At each prefix, choose the largest chunk whose step takes at most the target time.

    If no chunk in ADAPTIVE_CHUNKS meets the target, choose the smallest chunk (arXiv 2409.17264, section 4.2).

    Args:
        tokens: length of the prompt.
        target_s: target for the time of each step, in seconds.
        decodes: work of the decodes in the same step.
        nodes: number of prefixes at which the chunk is chosen.
    """
    prefixes = (np.arange(nodes) + 0.5) / nodes * tokens
    chunks = np.array(ADAPTIVE_CHUNKS, dtype=np.float64)
    works = layouts.chunk(chunks[:, None, None], prefixes[:, None])
    steps_s = cycle_seconds(setting, layouts, works + decodes)  # (chunks, nodes, n)
    # The largest chunk that meets the target. If no chunk meets the target, the smallest chunk.
    largest = np.where(steps_s <= target_s, np.arange(len(chunks))[:, None, None], 0).max(axis=0)
    chosen, taken_s = chunks[largest], np.take_along_axis(steps_s, largest[None], axis=0)[0]
    total_s, longest_s = sum(taken_s / chosen, layouts.zeros) * (tokens / nodes), taken_s.max(axis=0)
    seconds = (total_s + (layouts.pp - 1) * longest_s) / layouts.pp + first_token_seconds(setting, layouts)
    return AdaptivePrefill(seconds, prefixes, chosen, taken_s)


def ring_seconds(setting: Setting, layouts: Layouts, tokens: float, *, striped: bool) -> Array:
    """Return the seconds of a prefill of n tokens without chunks, by ring attention on p KVP ranks.

    Each rank holds n/p tokens. In each of p rounds, a rank attends to n/p keys, sends them to the next rank, and
    receives the keys of the previous rank. In plain ring order, the slowest rank attends to all keys, because all keys
    precede its queries. If `striped`, the causal mask removes half of the query-key pairs on each rank (arXiv
    2311.09431). Each rank computes all layers for its n/p rows, with the FFN at TP = TPA.
    """
    ranks, rows = layouts.kvp, tokens / layouts.kvp
    alone = replace(layouts, kvp=layouts.ones, tpf=layouts.tpa, ep=layouts.ones,
                    ffn_replicas=layouts.ones, hop_b=np.zeros_like(layouts.hop_b))  # fmt: skip
    pairs = rows * rows * (0.5 if striped else 1.0)
    (layer,) = setting.layers.kinds
    (mixer,) = layer.mixers
    assert not isinstance(mixer.spec, LinearAttention)
    own = attention_items(
        setting, alone, mixer.spec, mixer.weights, Work(chunk_rows=rows, chunk_kv_tokens=rows, chunk_pairs=pairs)
    )
    attend_s = next(item.seconds for item in own if item.name == "attention")
    token_bytes = layouts.kv_heads(mixer.spec.heads) * setting.kv_head_bytes(mixer.spec)
    passed = collectives.send(setting.system, layouts.tpa, rows * token_bytes)
    rounds_s = attend_s + (ranks - 1) * np.maximum(attend_s, passed.seconds)
    ffn = [
        item
        for each in layer.ffns
        for item in ffn_items(setting, alone, each.spec, each.weights, Work(chunk_rows=rows))
    ]
    layer_s = total_seconds([*own, *ffn]) - attend_s + rounds_s
    return setting.model.num_layers * layer_s + first_token_seconds(setting, alone)
