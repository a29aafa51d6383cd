"""Policies: who goes next."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from longhelix.request import Request
from longhelix.scheduler.sequence import Sequence


class Policy(Protocol):
    """Whom the scheduler serves first. Without state: it is asked anew for each step."""

    def first(self, waiting: Mapping[int, Request], now_s: float) -> Request:
        """Of requests in the order of their arrival, at least one, the next to be admitted: no other overtakes it."""
        ...

    def order(self, prompts: Iterable[Sequence], now_s: float) -> list[Sequence]:
        """Sequences with prompt tokens left, in the order of their admission, the first to be served first."""
        ...


class FirstComeFirstServed:
    """In the order of arrival."""

    def first(self, waiting: Mapping[int, Request], now_s: float) -> Request:
        return next(iter(waiting.values()))

    def order(self, prompts: Iterable[Sequence], now_s: float) -> list[Sequence]:
        return list(prompts)
