"""HOP-B: the exchange of one part of a batch while the next part's attention computes (Helix, section 2.1.3)."""

from dataclasses import dataclass

import numpy as np

from longhelix.perf.layouts import Array

_MOST_HALVINGS = 10


def pipelined_s(attention_s: float | Array, exchange_s: float | Array, parts: float | Array) -> Array:
    """Return the seconds of `parts` equal parts. Each computes for `attention_s` and then sends for `exchange_s`.

    a + (n - 1) max(a, c) + c: Figure 3 of arXiv 2507.07120, where 8 parts of 2 and 1.2 take 17.2.
    """
    steady_s: Array = (parts - 1) * np.maximum(attention_s, exchange_s)
    return attention_s + steady_s + exchange_s


@dataclass(frozen=True)
class Overlap:
    """The time of attention and of the exchange before they are cut into parts, as arrays over layouts or steps.

    attention_fixed_s and exchange_fixed_s are the fixed costs in attention_s and exchange_s. Each part pays
    `part_fixed_share` of them in full, and its share of the rest.
    """

    attention_s: Array
    attention_fixed_s: Array
    exchange_s: Array
    exchange_fixed_s: Array
    part_fixed_share: float

    def seconds(self, parts: float | Array) -> Array:
        """Return the seconds of attention and exchange in `parts` equal parts."""
        again = self.part_fixed_share * (1 - 1 / parts)
        attention_part_s = self.attention_s / parts + self.attention_fixed_s * again
        exchange_part_s = self.exchange_s / parts + self.exchange_fixed_s * again
        return pipelined_s(attention_part_s, exchange_part_s, parts)

    def overlapped_s(self, most_parts: float | Array) -> Array:
        """Return the seconds with the best number of parts."""
        return self.seconds(self.best_parts(most_parts))

    def best_parts(self, most_parts: float | Array) -> Array:
        """Return the fastest number of parts among 1, the powers of two below `most_parts`, and `most_parts`. The
        smaller one if two are equally fast."""
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
