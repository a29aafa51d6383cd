"""HOP-B: the exchange of one part of a batch while the next part's attention computes (Helix, section 2.1.3)."""

from dataclasses import dataclass

import numpy as np

from longhelix.perf.layouts import Array

_MOST_HALVINGS = 10


def pipelined_s(attention_s: float | Array, exchange_s: float | Array, parts: float | Array) -> Array:
    """Seconds of `parts` equal parts, of which each computes for `attention_s` and then sends for `exchange_s`.

    a + (n - 1) max(a, c) + c: Figure 3 of arXiv 2507.07120, where 8 parts of 2 and 1.2 take 17.2.
    """
    steady_s: Array = (parts - 1) * np.maximum(attention_s, exchange_s)
    return attention_s + steady_s + exchange_s


@dataclass(frozen=True)
class Overlap:
    """What attends and what is exchanged, arrays over layouts or steps, before it is cut into parts.

    attention_s, exchange_s: their seconds; attention_fixed_s, exchange_fixed_s: how much of that are fixed costs, of
    which a part of n pays the n-th, and for `part_fixed_share` of them the whole.
    """

    attention_s: Array
    attention_fixed_s: Array
    exchange_s: Array
    exchange_fixed_s: Array
    part_fixed_share: float

    def seconds(self, parts: float | Array) -> Array:
        """Seconds of attention and exchange in `parts` equal parts."""
        again = self.part_fixed_share * (1 - 1 / parts)
        attention_part_s = self.attention_s / parts + self.attention_fixed_s * again
        exchange_part_s = self.exchange_s / parts + self.exchange_fixed_s * again
        return pipelined_s(attention_part_s, exchange_part_s, parts)

    def overlapped_s(self, most_parts: float | Array) -> Array:
        """Seconds with the best number of parts."""
        return self.seconds(self.best_parts(most_parts))

    def best_parts(self, most_parts: float | Array) -> Array:
        """The number of parts, 1 to `most_parts`, that takes the fewest seconds, the smaller of two that take the same:
        of 1, the powers of two and `most_parts`."""
        most = np.maximum(most_parts, 1.0)
        best = np.zeros_like(most) + 1.0
        best_s = self.seconds(best)
        # Where parts divide the fixed costs too, more parts never take longer.
        halvings = range(1, _MOST_HALVINGS) if self.part_fixed_share > 0 else ()
        for parts in (*(np.minimum(2.0**halving, most) for halving in halvings), most):
            seconds = self.seconds(parts)
            best = np.where(seconds < best_s, parts, best)
            best_s = np.minimum(seconds, best_s)
        return best
