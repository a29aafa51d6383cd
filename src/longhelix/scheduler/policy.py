"""Policies: which request goes next."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from longhelix.request import Request
from longhelix.scheduler.sequence import Sequence


class Policy(Protocol):
    """Decides which request is served first. It has no state, and is asked anew for each step."""

    def first(self, waiting: Mapping[int, Request], now_s: float) -> Request:
        """The next request to be admitted, of at least one, given in order of arrival. No other request overtakes
        it."""
        ...

    def order(self, prompts: Iterable[Sequence], now_s: float) -> list[Sequence]:
        """Sequences with prompt tokens left, the first to be served first. They are given in order of admission."""
        ...


class FirstComeFirstServed:
    """In the order of arrival."""

    def first(self, waiting: Mapping[int, Request], now_s: float) -> Request:
        return next(iter(waiting.values()))

    def order(self, prompts: Iterable[Sequence], now_s: float) -> list[Sequence]:
        return list(prompts)
