"""Asynchronous interface to the engine: submits requests and delivers their updates on an event loop."""

import asyncio
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, TypeVar

from longhelix.engine.llm import LLM
from longhelix.engine.observation import Observation, ObservedStep
from longhelix.engine.result import Delta
from longhelix.errors import EngineError
from longhelix.serve.engine_request import (
    EngineRequest,
    IdleNotice,
    PendingRequest,
    PrefillProgress,
    RequestUpdate,
    fail,
    settle,
)
from longhelix.serve.engine_thread import EngineThread, Recovery
from longhelix.serve.refusals import OverloadedError, RestartingError, ShuttingDownError
from longhelix.serve.request_progress import NullObserver, RequestObserver, RequestProgress

_Value = TypeVar("_Value")
_RECOVERY = Recovery()
Listener = Callable[[Sequence[Delta], Sequence[ObservedStep]], None]


@dataclass(frozen=True)
class Limits:
    """Limits on the requests that wait for their first token."""

    requests: int
    prompt_tokens: int  # total over all waiting requests


class RequestGroup:
    """The engine requests of one HTTP request, and an asynchronous iterator over their updates.

    The iterator yields pairs (index of the request, update) until all requests have their results. It also yields
    `(0, IdleNotice())` after each call of `notify_idle`. It raises the error of the first request that fails. Leaving
    the `async with` block aborts the requests that have not ended.

    Args:
        driver: the engine.
        observer: called with every event of these requests.
    """

    def __init__(self, driver: "Driver", observer: RequestObserver | None = None) -> None:
        self._driver = driver
        self._observer = NullObserver() if observer is None else observer
        self._open: dict[int, PendingRequest] = {}
        self._updates: asyncio.Queue[tuple[int, RequestUpdate | IdleNotice]] = asyncio.Queue()
        self._has_idle_notice = False

    async def submit(self, requests: Sequence[EngineRequest]) -> None:
        """Queue all requests or none of them, and wait until the engine has accepted them.

        Raises:
            OverloadedError: too many requests are waiting.
            EngineError: the engine has failed.
            UserError: a request can never run.
        """
        self._driver.check_room([request.num_tokens for request in requests])
        for place, request in enumerate(requests):
            self._open[place] = self._driver.add(request, partial(self._on_update, place))
            self._observer.on_queued(self._open[place].progress)
        pending_requests = list(self._open.values())
        try:
            for pending in pending_requests:
                await pending.accepted
        except BaseException:
            self.end()
            raise
        for pending in pending_requests:
            self._observer.on_accepted(pending.progress)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Delta | PrefillProgress | IdleNotice]:
        if not self._open:
            raise StopAsyncIteration
        place, update = await self._updates.get()
        if isinstance(update, IdleNotice):
            self._has_idle_notice = False
        if isinstance(update, Exception):
            del self._open[place]
            raise update
        if isinstance(update, Delta) and update.result is not None:
            del self._open[place]
        return place, update

    @property
    def is_open(self) -> bool:
        """True if a request has not ended or an update has not been read."""
        return bool(self._open)

    def notify_idle(self) -> None:
        """Add an `IdleNotice` to the updates, unless an earlier notice has not been read yet."""
        if not self._has_idle_notice:
            self._has_idle_notice = True
            self._updates.put_nowait((0, IdleNotice()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Abort the requests that have not ended."""
        for pending in self._open.values():
            self._driver.abort(pending)
            if not pending.was_refused:
                self._on_ended(pending.progress, "abort")
        self._open.clear()

    def _on_update(self, place: int, update: RequestUpdate) -> None:
        pending = self._open.get(place)
        if pending is not None and isinstance(update, Delta):
            self._observer.on_delta(pending.progress, update)
        elif pending is not None and isinstance(update, Exception):
            self._on_ended(pending.progress, "abort" if isinstance(update, ShuttingDownError) else "error")
        self._updates.put_nowait((place, update))

    def _on_ended(self, progress: RequestProgress, reason: str) -> None:
        if not progress.has_ended:
            self._observer.on_ended(progress, reason)


class Driver:
    """Runs an LLM on a thread and forwards its updates to the event loop.

    Only that thread calls the LLM. All methods and callbacks run on the event loop that calls `start`.

    If the engine fails, the driver restarts it and its requests continue. If it fails too often or cannot be restarted,
    the driver ends all requests with the reason and refuses new ones.
    """

    def __init__(self, llm: LLM, limits: Limits, recovery: Recovery = _RECOVERY) -> None:
        self.failure = ""  # why the engine has failed for good; empty if it has not
        self.restarting = ""  # why the engine is restarting; empty if it is not
        self.restarts = 0
        # Each is called with the new deltas and the completed steps.
        self.listeners: list[Listener] = []
        # Called with the reason, when the engine restarts or when it has failed for good.
        self.restart_listener: Callable[[str], None] = lambda reason: None
        self.restarted_listener: Callable[[], None] = lambda: None
        self.failure_listener: Callable[[str], None] = lambda reason: None
        self.steps = 0
        self.last_step_s = time.monotonic()
        self._llm, self._limits = llm, limits
        self._engine = EngineThread(llm, recovery, self)
        self._accepted: dict[int, PendingRequest] = {}
        self._calls: set[asyncio.Future[Any]] = set()  # pending results of `call`
        self._queued: set[PendingRequest] = set()  # requests that the engine has not accepted yet

    def start(self) -> None:
        self._engine.start()

    async def observe(self) -> Observation:
        """Return the state of the engine between two steps. Raises EngineError if the engine fails before that."""
        return await self.call(self._llm.observe)

    async def call(self, function: Callable[[], _Value]) -> _Value:
        """Call a function of the LLM between two steps and return its result.

        Raises whatever the function raises, or EngineError if the engine fails before the call.
        """
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._check_running()
        self._calls.add(result)
        self._engine.call(function, result)
        try:
            return await result
        finally:
            self._calls.discard(result)

    async def close(self) -> None:
        """Stop the engine and everything that runs in it."""
        await self._engine.close()

    @property
    def is_idle(self) -> bool:
        """True if there are no open requests and no context is being saved."""
        return not (self._queued or self._accepted or self._llm.is_saving)

    def end_all(self, error: Exception) -> None:
        """Abort all requests and pending calls with an error."""
        for result in self._calls:
            fail(result, error)
        for pending in (*self._queued, *self._accepted.values()):
            self._end(pending, error)
            self.abort(pending)
        self._queued.clear()
        self._accepted.clear()

    @property
    def still_s(self) -> float:
        """Seconds since any rank last made progress in the running step."""
        return self._llm.still_s

    @property
    def most_requests(self) -> int:
        """Maximum number of waiting requests."""
        return self._limits.requests

    @property
    def request_ids(self) -> Set[int]:
        """Ids of the accepted requests. They do not include contexts that are being saved."""
        return self._accepted.keys()

    @property
    def running(self) -> int:
        """Number of requests that have received their first token."""
        return sum(not pending.is_waiting for pending in self._accepted.values())

    @property
    def waiting(self) -> list[EngineRequest]:
        """Requests without a first token."""
        return [pending.request for pending in (*self._queued, *self._accepted.values()) if pending.is_waiting]

    def check_room(self, lengths: Sequence[int]) -> None:
        """Check whether more requests may wait. If no request is waiting, a single new request may have any length.

        Args:
            lengths: prompt tokens of each new request.

        Raises:
            OverloadedError: the new requests would exceed the limits.
            RestartingError: the engine is restarting.
            EngineError: the engine has failed.
        """
        self._check_running()
        waiting = self.waiting
        before = sum(request.num_tokens for request in waiting)
        alone = not waiting and len(lengths) == 1
        tokens_beyond = not alone and before + sum(lengths) > self._limits.prompt_tokens
        if len(waiting) + len(lengths) > self._limits.requests or tokens_beyond:
            raise OverloadedError(f"{len(waiting)} requests with {before} prompt tokens are waiting: try again later")

    def _check_running(self) -> None:
        if self.failure:
            raise EngineError(self.failure)
        if self.restarting:
            raise RestartingError

    def add(self, request: EngineRequest, on_update: Callable[[RequestUpdate], None]) -> PendingRequest:
        """Queue a request. If the engine refuses it, the future `accepted` fails with the reason."""
        pending = PendingRequest(request, on_update)
        self._queued.add(pending)
        self._engine.add(pending)
        return pending

    def abort(self, pending: PendingRequest) -> None:
        """Abort a request in any phase."""
        self._engine.abort(pending)

    # Callbacks of the engine thread (see `EngineObserver`).

    def on_accepted(self, pending: PendingRequest, request_id: int) -> None:
        if pending in self._queued:  # otherwise `end_all` has already removed it
            self._queued.remove(pending)
            pending.request = replace(pending.request, prompt=(), context=None)  # the engine has its own copies
            self._accepted[request_id] = pending
            settle(pending.accepted, None)

    def on_refused(self, pending: PendingRequest, error: Exception) -> None:
        self._queued.discard(pending)
        fail(pending.accepted, error)

    def on_abandoned(self, pending: PendingRequest) -> None:
        self._queued.discard(pending)

    def on_aborted(self, request_id: int) -> None:
        self._accepted.pop(request_id, None)

    def on_step(self, deltas: list[Delta], progress: dict[int, PrefillProgress], ran: list[ObservedStep]) -> None:
        self.steps += len(ran)
        self.last_step_s = time.monotonic()
        self._record_steps(ran)
        for listener in self.listeners:
            listener(deltas, ran)
        for request_id, update in progress.items():
            if request_id in self._accepted:  # otherwise the request has been aborted
                self._accepted[request_id].on_update(update)
        for delta in deltas:
            pending = self._accepted.get(delta.request_id)
            if pending is None:
                continue
            pending.is_waiting = False
            pending.on_update(delta)
            if delta.result is not None:
                self.on_aborted(delta.request_id)

    def _record_steps(self, ran: list[ObservedStep]) -> None:
        """Record when the first step of each request began."""
        for step in ran:
            for chunk in step.chunks:
                if chunk.request_id in self._accepted:
                    self._accepted[chunk.request_id].progress.on_step(self.last_step_s - step.taken_s)

    def on_restarting(self, reason: str) -> None:
        self.restarting = reason
        self.restarts += 1
        self.restart_listener(reason)

    def on_restarted(self) -> None:
        self.restarting = ""
        self.last_step_s = time.monotonic()
        self.restarted_listener()

    def on_failed(self, reason: str) -> None:
        self.failure, self.restarting = reason, ""
        self.failure_listener(reason)
        self.end_all(EngineError(reason))

    def _end(self, pending: PendingRequest, error: Exception) -> None:
        if pending in self._queued:
            fail(pending.accepted, error)
        else:
            pending.on_update(error)
