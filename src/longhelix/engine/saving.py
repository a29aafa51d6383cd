"""Saves a context. A request computes the context's KV. The ranks then write one part to disk between two steps."""

from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal

from longhelix.compute.cache.saved_context import SavedContext
from longhelix.engine.contexts import Contexts, NewContext
from longhelix.engine.result import Delta
from longhelix.errors import RequestError, UserError

_MOST_ATTEMPTS = 3  # how many times to compute the KV if other requests evict it before it is written

Status = Literal["computing", "saving", "ready", "failed"]


@dataclass(frozen=True)
class Computing:
    """Functions that run a prompt as a request."""

    add: Callable[[deque[Delta]], int]  # queues the request and returns its id; its deltas go into the deque
    prefilled: Callable[[int], int]  # how many of its prompt tokens were sent to the ranks; 0 while it waits
    abort: Callable[[int], object]  # aborts the request


class Saving:
    """Saves one context while other requests run.

    The code that drives the engine calls `advance` after each step. If other requests evict the KV before it is
    written, the KV is computed again.
    """

    def __init__(self, contexts: Contexts, new: NewContext, computing: Computing) -> None:
        """Queue the request that computes the context. Raises UserError if it can never run."""
        self.new = new
        self.status: Status = "computing"  # any thread may read it
        self.prefilled_tokens = 0  # any thread may read it
        self.saved: SavedContext | None = None  # set when the status is "ready"
        self.error: Exception | None = None  # set when the status is "failed"
        self._contexts, self._computing = contexts, computing
        self._deltas: deque[Delta] = deque()
        self._writing: Generator[None, None, SavedContext | None] | None = None
        self._failures = 0  # engine failures while the context was written
        self._evictions = 0  # how many times the KV was evicted before it was written
        self._compute()

    @property
    def has_ended(self) -> bool:
        """True if the context has been saved or saving it has failed."""
        return self.status in ("ready", "failed")

    def advance(self) -> bool:
        """Write the next part if the prompt has been computed.

        An error of this context or of the disk is stored in `error` and does not stop the engine.

        Returns:
            Whether there was work to do.
        """
        if self.has_ended:
            return False
        try:
            return self._write() if self._is_computed() else False
        except (UserError, RequestError) as error:
            self.end(error)
            return True

    def begin_again(self, most_failures: int) -> None:
        """Continue after the engine has restarted.

        If the context was still being computed, its request continues without further action. If the context was being
        written, it is computed again. Saving fails if this has happened more than `most_failures` times.
        """
        if self._writing is None:
            return
        self._failures += 1
        if self._failures > most_failures:
            self.end(RequestError(f"the engine failed {self._failures} times while the context was written"))
        else:
            self._compute_again()

    def end(self, error: Exception) -> None:
        """Stop saving, store the reason and remove partial files. Does nothing if saving has already ended."""
        if self.has_ended:
            return
        self.error = error
        self.status = "failed"
        if self._writing is not None:
            self._writing.close()
        else:
            self._computing.abort(self._request_id)

    def result(self) -> SavedContext:
        """Return the saved context. Raises the error if saving failed."""
        if self.saved is None:
            assert self.error is not None, "call it only when saving has ended"
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
            raise RequestError(f"the request that computes the context failed: {result.error}")
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
            self._evictions += 1
            if self._evictions >= _MOST_ATTEMPTS:
                raise _evicted(self.new.name) from None
            self._compute_again()
        return True


def _evicted(name: str) -> UserError:
    return UserError(
        f"context {name!r} was computed {_MOST_ATTEMPTS} times, and each time other requests evicted its KV before it "
        "was saved: save it while fewer requests run, or increase --kv-cache-tokens",
        "kv_cache_exceeded",
    )
