"""Time to first token of a chunked prefill with TP, KVP and SPP."""

from dataclasses import dataclass

import numpy as np

from longhelix.perf.layouts import Array, Layouts
from longhelix.perf.setting import Setting
from longhelix.perf.step import cycle_seconds, step_seconds
from longhelix.scheduler.work import NO_WORK, Work

# Chunk times are piecewise linear in the prefix: a sum over thousands of chunks is taken at so many of them.
_NODES = 16


@dataclass(frozen=True)
class Prefill:
    """The times of a chunked prefill. seconds: from the first chunk to the first new token. busy_s: the part of this in
    which a stage computes chunks. longest_s: the longest step."""

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
    """Return the prefill times of `tokens` tokens after `prefix` cached ones.

    With PP stages, a chunk enters the first stage once the previous one has left it (sequence pipeline parallelism,
    arXiv 2409.17264, section 4.3): of n chunks that take t_i in each of p stages the last is through after
    sum(t_i) + (p - 1) max(t_i), where t_i is the slowest stage's.

    Args:
        chunk: The most rows of a chunk.
        beside: The decodes in each step with a chunk.
        nodes: The sum is taken at this many chunks.
    """
    chunks = np.ceil(tokens / np.asarray(chunk, dtype=np.float64))
    rows = tokens / chunks
    before = prefix + rows * (np.multiply.outer((np.arange(nodes) + 0.5) / nodes, np.atleast_1d(chunks)) - 0.5)
    paths_s = cycle_seconds(setting, layouts, layouts.chunk(np.atleast_1d(rows), before) + beside)
    # Summed one by one, so that a layout's time does not depend on the number of layouts.
    busy_s: Array = sum(paths_s, layouts.zeros) * chunks / nodes / layouts.pp
    longest_s: Array = paths_s.max(axis=0)
    fill_s = (layouts.pp - 1) * longest_s / layouts.pp
    return Prefill(busy_s + fill_s + first_token_seconds(setting, layouts), busy_s, longest_s)


def prefill_seconds(setting: Setting, layouts: Layouts, tokens: float | Array, chunk: float | Array) -> Array:
    """Return the seconds from the first chunk of `tokens`, alone on a system, to the first new token."""
    return prefill(setting, layouts, tokens, chunk).seconds


def first_token_seconds(setting: Setting, layouts: Layouts) -> Array:
    """Return the seconds that logits and sampling of the last row add to a chunk."""
    rows = layouts.chunk(1.0, 0.0)
    sampled = rows._replace(sampled_rows=1.0)
    return step_seconds(setting, layouts, sampled) - step_seconds(setting, layouts, rows)
