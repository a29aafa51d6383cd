"""The stream that `LLM.stream` returns: one request's text as it is produced."""

from collections.abc import Callable
from types import TracebackType
from typing import Self

from longhelix.engine.result import Delta


class Stream:
    """Iterator over the deltas of one request. The last delta contains the result.

    You can read several streams at the same time, in any order. Closing or dropping a stream before its end aborts its
    request and frees its KV.
    """

    def __init__(
        self, next_delta: Callable[[], Delta], abort: Callable[[], object], abandon: Callable[[], object]
    ) -> None:
        """Args:
        next_delta: waits for the next delta and returns it.
        abort: aborts the request now.
        abandon: aborts the request when the engine next runs. The garbage collector may drop a stream at any moment,
            even in the middle of a step.
        """
        self._next_delta = next_delta
        self._abort = abort
        self._abandon = abandon
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        if self._ended:
            raise StopIteration
        delta = self._next_delta()
        self._ended = delta.result is not None
        return delta

    def close(self) -> None:
        """Abort the request if it has not ended. You may call this method more than once."""
        if not self._ended:
            self._ended = True
            self._abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._ended:
            self._abandon()
