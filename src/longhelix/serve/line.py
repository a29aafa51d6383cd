"""A line of requests before some threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from longhelix.serve.refusals import OverloadedError

_Value = TypeVar("_Value")


class Line:
    """Does what requests want on threads of its own, in the order in which they came: on one thread, one after the
    other. what: they have, as a sentence says it. most: that are done or wait. Callers are on one event loop."""

    def __init__(self, what: str, most: int, threads: int = 1) -> None:
        self._what, self._most = what, most
        self._length = 0
        self._threads = ThreadPoolExecutor(threads, what)

    async def run(self, do: Callable[..., _Value], *given: object) -> _Value:
        """What `do` makes of `given`. Raises OverloadedError if as many wait as may."""
        if self._length >= self._most:
            raise OverloadedError(f"{self._most} requests with {self._what} are waiting: try again later")
        self._length += 1
        wanted = [partial(do, *given)]
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: wanted.pop()())
        finally:
            wanted.clear()  # who has gone leaves nothing in the line, which may be long
            self._length -= 1
