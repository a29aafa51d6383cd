"""A context on its way to the disk: computed as a request is, then written, a part between two steps."""

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal

from longhelix.compute.cache.saved_context import SavedContext
from longhelix.engine.contexts import Contexts, NewContext
from longhelix.engine.result import Delta
from longhelix.errors import RequestError, UserError

_MOST_ATTEMPTS = 3  # to compute KV that others then displace

Status = Literal["computing", "saving", "ready", "failed"]


@dataclass(frozen=True)
class Computing:
    """What computes a prompt: add: queues its request, whose deltas come into the deque, and gives its id. prefilled:
    how many of its tokens the ranks have; 0 while it waits. abort: ends it."""

    add: Callable[[deque[Delta]], int]
    prefilled: Callable[[int], int]
    abort: Callable[[int], object]


class Saving:
    """Other requests run meanwhile: whoever runs the engine calls `advance` after each step. Where they displace what
    was computed before it is written, it is computed again.

    status and prefilled_tokens may be read by any thread; saved: once it is ready; error: why it failed.
    """

    def __init__(self, contexts: Contexts, new: NewContext, computing: Computing) -> None:
        """Queues the request. Raises UserError if that can never run."""
        self.new = new
        self.status: Status = "computing"
        self.prefilled_tokens = 0
        self.saved: SavedContext | None = None
        self.error: Exception | None = None
        self._contexts, self._computing = contexts, computing
        self._deltas: deque[Delta] = deque()
        self._writing: Generator[None, None, SavedContext | None] | None = None
        self._failures = 0  # of the engine while it was written
        self._displaced = 0
        self._compute()

    @property
    def has_ended(self) -> bool:
        return self.status in ("ready", "failed")

    def advance(self) -> bool:
        """Write the next part, if the prompt has been computed. Returns whether there was something to do. What is
        wrong with this context or its disk is its `error`."""
        if self.has_ended:
            return False
        try:
            return self._write() if self._is_computed() else False
        except (UserError, RequestError) as error:
            self.end(error)
            return True

    def begin_again(self, most_failures: int) -> None:
        """The engine has failed and begun again. A request that had not ended goes on by itself; what was computed is
        gone. One that was written in more than `most_failures` failures ends."""
        if self._writing is None:
            return
        self._failures += 1
        if self._failures > most_failures:
            self.end(RequestError(f"the engine has failed {self._failures} times while the context was written"))
        else:
            self._compute_again()

    def end(self, error: Exception) -> None:
        """Give it up for that reason, unless it has ended. Nothing of it stays on the disk."""
        if self.has_ended:
            return
        self.error = error
        self.status = "failed"
        if self._writing is not None:
            self._writing.close()
        else:
            self._computing.abort(self._request_id)

    def result(self) -> SavedContext:
        """What was saved. Raises the error of one that failed."""
        if self.saved is None:
            assert self.error is not None, "it has ended"
            raise self.error
        return self.saved

    def _compute_again(self) -> None:
        assert self._writing is not None
        self._writing.close()
        self._writing, self.status, self.prefilled_tokens = None, "computing", 0
        self._compute()

    def _compute(self) -> None:
        self._deltas.clear()
        self._request_id = self._computing.add(self._deltas)

    def _is_computed(self) -> bool:
        if self._writing is not None:
            return True
        self.prefilled_tokens = self._computing.prefilled(self._request_id)
        result = self._deltas[-1].result if self._deltas else None
        if result is None:
            return False
        if result.finish_reason == "error":
            raise RequestError(f"the context's request failed: {result.error}")
        self.prefilled_tokens = len(self.new.token_ids)
        self._writing, self.status = self._contexts.writing(self.new), "saving"
        return True

    def _write(self) -> bool:
        assert self._writing is not None
        try:
            next(self._writing)
        except StopIteration as ended:
            if ended.value is not None:
                self.saved = ended.value
                self.status = "ready"
                return True
            self._displaced += 1
            if self._displaced >= _MOST_ATTEMPTS:
                raise _displaced(self.new.name) from None
            self._compute_again()
        return True


def _displaced(name: str) -> UserError:
    return UserError(
        f"context {name!r} was computed {_MOST_ATTEMPTS} times, and each time other requests needed its room before it "
        "was saved: save it when fewer run, or set --kv-cache-tokens to more",
        "kv_cache_exceeded",
    )
