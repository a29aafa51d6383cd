"""Predicted seconds of prefills, by length."""

from functools import lru_cache

from longhelix.scheduler.work import Cost, Work

_TOKENS = 1024
_MOST_TABLES = 64  # requests may have limits of their own


class PrefillTimes:
    """Predicts the seconds of a prompt's prefill alone, in chunks of 1,024 tokens.

    Like Medha (arXiv 2409.17264v4), it has tables that grow with the longest prompt, one per `alone_tokens` of
    placements. Without a cost, a token counts as a second, so only ratios are meaningful.
    """

    def __init__(self, cost: Cost | None, kvp: int) -> None:
        self._cost = cost
        self._kvp = kvp
        self._table = lru_cache(_MOST_TABLES)(lambda alone_tokens: [0.0])  # seconds by number of chunks

    def until(self, tokens: int, alone_tokens: float) -> float:
        """Return the seconds of the first `tokens`. One KVP rank has the first `alone_tokens` of them alone."""
        if self._cost is None:
            return float(tokens)
        until_s, (whole, rest) = self._table(alone_tokens), divmod(tokens, _TOKENS)
        while len(until_s) <= whole + 1:
            work = Work.growing_chunk(_TOKENS, (len(until_s) - 1) * _TOKENS, self._kvp, alone_tokens)
            until_s.append(until_s[-1] + self._cost.seconds(work))
        before_s = until_s[whole]
        return before_s + (until_s[whole + 1] - before_s) * rest / _TOKENS

    def between(self, start: int, stop: int, alone_tokens: float) -> float:
        """Return the seconds of the tokens from `start` to `stop`."""
        return self.until(stop, alone_tokens) - self.until(start, alone_tokens)
