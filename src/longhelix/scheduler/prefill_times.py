"""Predicted seconds of prefills, by length."""

from longhelix.request import Cost, Work

_TOKENS = 1024


class PrefillTimes:
    """Seconds of a prompt's prefill alone, in chunks of 1,024 tokens: a table that grows with the longest prompt, as
    Medha's (arXiv 2409.17264v4).

    Without a cost, a token counts as a second: only ratios are then of use.
    """

    def __init__(self, cost: Cost | None) -> None:
        self._cost = cost
        self._until_s = [0.0]  # by number of chunks

    def until(self, tokens: int) -> float:
        """Of the first `tokens`."""
        if self._cost is None:
            return float(tokens)
        whole, rest = divmod(tokens, _TOKENS)
        while len(self._until_s) <= whole + 1:
            prefix = (len(self._until_s) - 1) * _TOKENS
            self._until_s.append(self._until_s[-1] + self._cost.seconds(Work.chunk(_TOKENS, prefix)))
        before_s = self._until_s[whole]
        return before_s + (self._until_s[whole + 1] - before_s) * rest / _TOKENS

    def between(self, start: int, stop: int) -> float:
        """Of the tokens from `start` to `stop`."""
        return self.until(stop) - self.until(start)
