"""HOP-B: the exchange of one part of a batch while the next part's attention computes (Helix, section 2.1.3)."""

import numpy as np

from longhelix.perf.layouts import Array

_MOST_HALVINGS = 10


def pipelined_s(attention_s: float | Array, exchange_s: float | Array, parts: float | Array) -> Array:
    """Seconds of `parts` equal parts, of which each computes for `attention_s` and then sends for `exchange_s`.

    a + (n - 1) max(a, c) + c: Figure 3 of arXiv 2507.07120, where 8 parts of 2 and 1.2 take 17.2.
    """
    return np.asarray(attention_s + (parts - 1) * np.maximum(attention_s, exchange_s) + exchange_s)


def overlapped_s(
    attention_s: Array, attention_fixed_s: Array, exchange_s: Array, exchange_fixed_s: Array, most_parts: Array,
    part_fixed_share: float,
) -> Array:  # fmt: skip
    """Seconds of attention and exchange with the best number of parts, 1 to `most_parts`.

    Fixed costs, which are parts of `attention_s` and `exchange_s`: a part of n pays the n-th of them, and for
    `part_fixed_share` of them the whole.
    """
    best = attention_s + exchange_s
    # Where parts divide the fixed costs too, more parts never take longer.
    counts = [np.maximum(most_parts, 1.0)]
    if part_fixed_share > 0:
        counts += [np.clip(2.0**halving, 1.0, counts[0]) for halving in range(1, _MOST_HALVINGS)]
    for parts in counts:
        again = part_fixed_share * (1 - 1 / parts)
        attention_part_s = attention_s / parts + attention_fixed_s * again
        exchange_part_s = exchange_s / parts + exchange_fixed_s * again
        best = np.minimum(best, pipelined_s(attention_part_s, exchange_part_s, parts))
    return np.asarray(best)
