"""One request's text as it comes."""

from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from longhelix.engine.result import Delta


class Stream:
    """The deltas of one request, the last of which has its result. Streams are read in any order, side by side.

    A stream that is closed, dropped, or left by an error before its end aborts its request, which frees its KV.
    """

    def __init__(self, deltas: deque[Delta], advance: Callable[[], None], abort: Callable[[], object]) -> None:
        """`deltas` is where the engine leaves what `advance`, one more step of it, gives this request."""
        self._deltas = deltas
        self._advance = advance
        self._abort = abort
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        while not self._ended and not self._deltas:
            self._advance()
        if self._ended:
            raise StopIteration
        delta = self._deltas.popleft()
        self._ended = delta.result is not None
        return delta

    def close(self) -> None:
        """Abort the request, if it has not ended; again does nothing."""
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
        self.close()
