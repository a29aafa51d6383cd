"""A line of requests before one thread."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from longhelix.serve.refusals import OverloadedError

_Value = TypeVar("_Value")


class Line:
    """Does what requests want on a thread of its own, one after the other in the order in which they came. what: they
    have, as a sentence says it. most: that are done or wait. Callers are on one event loop."""

    def __init__(self, what: str, most: int) -> None:
        self._what, self._most = what, most
        self._length = 0
        self._thread = ThreadPoolExecutor(1, what)

    async def run(self, do: Callable[..., _Value], *given: object) -> _Value:
        """What `do` makes of `given`. Raises OverloadedError if as many wait as may."""
        if self._length >= self._most:
            raise OverloadedError(f"{self._most} requests with {self._what} wait already: try again later")
        self._length += 1
        wanted = [partial(do, *given)]
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: wanted.pop()())
        finally:
            wanted.clear()  # who has gone leaves nothing in the line, which may be long
            self._length -= 1
