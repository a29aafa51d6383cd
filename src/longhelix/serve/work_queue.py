"""Bounded queue of function calls for a few threads."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from longhelix.serve.refusals import OverloadedError

_Value = TypeVar("_Value")


class WorkQueue:
    """Bounded first-in, first-out queue of function calls that run on dedicated threads.

    All methods must be called on the same event loop.

    Args:
        what: plural noun for the data that the calls process, such as "images", for thread names and errors.
        most: maximum number of calls that may run or wait at a time.
        threads: number of threads. With one thread, calls run one after the other.
    """

    def __init__(self, what: str, most: int, threads: int = 1) -> None:
        self._what, self._most = what, most
        self._length = 0
        self._threads = ThreadPoolExecutor(threads, what)

    async def run(self, do: Callable[..., _Value], *given: object) -> _Value:
        """Call `do(*given)` on a thread and return its result.

        Raises:
            OverloadedError: the queue is full.
        """
        if self._length >= self._most:
            raise OverloadedError(f"{self._most} requests with {self._what} are waiting: try again later")
        self._length += 1
        wanted = [partial(do, *given)]
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: wanted.pop()())
        finally:
            wanted.clear()  # release the arguments of a cancelled call that is still in the queue
            self._length -= 1
