"""The thread that runs an LLM. No other thread calls it."""

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from longhelix.engine.llm import LLM
from longhelix.engine.observation import ObservedStep
from longhelix.engine.result import Delta
from longhelix.errors import EngineError, UserError
from longhelix.serve.engine_request import PendingRequest, PrefillProgress, fail, settle
from longhelix.serve.refusals import ShuttingDownError

_Value = TypeVar("_Value")
_HOUR_S = 3600
_WATCH_S = 0.25  # interval between health checks of idle ranks
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # first and longest pause before the ranks start again; pauses double
_COMMANDS_S = 0.05  # time limit for commands between two steps, because all running requests wait for them


@dataclass(frozen=True)
class Recovery:
    """How often the server recovers from engine failures."""

    restarts: int = 3  # maximum number of restarts within an hour
    # Number of engine failures that a request survives without two new tokens in between. The next failure ends it.
    failures: int = 1


class EngineObserver(Protocol):
    """Callbacks for events of the engine thread. They run on the event loop, in the order of the events."""

    def on_accepted(self, pending: PendingRequest, request_id: int) -> None:
        """The engine has accepted the request."""

    def on_refused(self, pending: PendingRequest, error: Exception) -> None:
        """The engine has refused the request."""

    def on_abandoned(self, pending: PendingRequest) -> None:
        """The request was aborted before the engine accepted it."""

    def on_aborted(self, request_id: int) -> None:
        """The engine has aborted the request."""

    def on_step(self, deltas: list[Delta], progress: dict[int, PrefillProgress], ran: list[ObservedStep]) -> None:
        """A step has completed.

        Args:
            deltas: new tokens and results.
            progress: prefill progress by request id, for the requests that want it.
            ran: the steps that have completed.
        """

    def on_restarting(self, reason: str) -> None:
        """The engine has failed and is restarting."""

    def on_restarted(self) -> None:
        """The engine has restarted."""

    def on_failed(self, reason: str) -> None:
        """The engine has failed for good, and the thread ends."""


class EngineThread:
    """Runs steps and, between two steps, commands from the event loop. Restarts an engine that fails."""

    def __init__(self, llm: LLM, recovery: Recovery, observer: EngineObserver) -> None:
        self._llm, self._recovery, self._observer = llm, recovery, observer
        self._failed_s: list[float] = []  # times of the recent failures after which the engine was restarted
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._aborted: deque[PendingRequest] = deque()
        self._prefilled: dict[int, int] = {}  # prompt tokens on the ranks, for requests that want progress
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # The event loop calls the following methods.

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """Stop the engine and everything that runs in it."""
        self._closing.set()
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._llm.close)

    def add(self, pending: PendingRequest) -> None:
        """Queue a request for the engine."""
        self._commands.put(lambda: self._add(pending))

    def abort(self, pending: PendingRequest) -> None:
        """Abort a request in any phase, before the next step and before all other commands."""
        pending.aborted = True  # set it now, so that the thread does not start work for a client that has disconnected
        self._aborted.append(pending)

    def call(self, function: Callable[[], _Value], result: "asyncio.Future[_Value]") -> None:
        """Call a function between two steps. `result` receives its return value or its error."""
        self._commands.put(lambda: self._call(function, result))

    # The engine thread calls the following methods.

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    self._serve()
                except Exception as error:
                    self._recover(error)
        except BaseException as error:  # clients must be notified, whatever ends this thread
            reason = _reason(error)
            try:
                self._llm.close()
            except BaseException as again:
                reason += f"; and the engine did not close: {_reason(again)}"
            self._notify(self._observer.on_failed, reason)

    def _serve(self) -> None:
        """Run commands and steps until the thread is closed or the engine fails."""
        while True:
            self._run_commands()
            if self._closing.is_set():
                return
            if self._llm.has_work:
                deltas = self._llm.step()
                progress, ran = self._progress(deltas), self._llm.ran_steps()
                self._notify(self._observer.on_step, deltas, progress, ran)

    def _recover(self, error: Exception) -> None:
        """Restart a failed engine, or raise the error if no more restarts are allowed."""
        first, pause_s = _reason(error), 0.0
        while True:
            now_s = time.monotonic()
            self._failed_s = [failed_s for failed_s in self._failed_s if now_s - failed_s < _HOUR_S]
            may_start = self._llm.has_failed and len(self._failed_s) < self._recovery.restarts
            if self._closing.is_set() or not may_start:
                raise error
            self._failed_s.append(now_s)
            self._notify(self._observer.on_restarting, _reason(error))
            if self._closing.wait(pause_s):
                return
            try:
                self._llm.restart(self._recovery.failures, on_load=self._check_open, on_warm_up=self._check_open)
            except ShuttingDownError:
                return
            except Exception as again:  # try again, because memory or file descriptors may not be free yet
                error = EngineError(f"{first}; and the ranks did not start again: {_reason(again)}")
                pause_s = min(max(2 * pause_s, _PAUSE_S), _LONGEST_PAUSE_S)
            else:
                self._notify(self._observer.on_restarted)
                return

    def _check_open(self, share: float) -> None:
        """Raise ShuttingDownError if the thread is closing, so that the shutdown does not wait for ranks to start."""
        if self._closing.is_set():
            raise ShuttingDownError

    def _progress(self, deltas: list[Delta]) -> dict[int, PrefillProgress]:
        """Return the prefill progress that this step made, by request id."""
        for delta in deltas:
            self._prefilled.pop(delta.request_id, None)
        before = self._prefilled
        now = {request_id: self._llm.prefilled_tokens(request_id) for request_id in before}
        # A preempted prompt starts from zero, but the reported progress never decreases.
        self._prefilled = {request_id: max(count, before[request_id]) for request_id, count in now.items()}
        return {request_id: PrefillProgress(count) for request_id, count in now.items() if count > before[request_id]}

    def _run_commands(self) -> None:
        """Run commands in order, for a limited time. The remaining commands run after the next step.

        If the engine is idle, wait for a command.
        """
        self._end_aborted()
        wait_s = 0.0
        if not self._llm.has_work:
            self._llm.watch()
            wait_s = _WATCH_S
        command = self._next(wait_s)
        until_s = time.monotonic() + _COMMANDS_S
        while command is not None:
            command()
            command = self._next() if time.monotonic() < until_s else None
        self._end_aborted()  # more requests may have been aborted in the meantime

    def _next(self, wait_s: float = 0.0) -> Callable[[], None] | None:
        """Return the next command, or None if no command arrives within `wait_s`."""
        try:
            return self._commands.get(timeout=wait_s)
        except queue.Empty:
            return None

    def _add(self, pending: PendingRequest) -> None:
        request = pending.request
        if pending.aborted:
            self._notify(self._observer.on_abandoned, pending)
            return
        try:
            request_id = self._llm.add(
                request.prompt,
                request.sampling,
                request.service,
                context=request.context,
                arrival_s=request.arrival_s,
                reasoning=request.reasoning,
            )
        except EngineError as error:
            pending.failures += 1
            if pending.failures > self._recovery.failures:
                self._notify(self._observer.on_refused, pending, error)
            else:
                self.add(pending)
            raise
        except Exception as error:
            self._notify(self._observer.on_refused, pending, error)
            return
        pending.request_id = request_id
        if request.wants_progress:
            self._prefilled[request_id] = 0
        self._notify(self._observer.on_accepted, pending, request_id)

    def _end_aborted(self) -> None:
        while self._aborted:
            request_id = self._aborted.popleft().request_id
            if request_id is not None:  # otherwise the engine has not accepted it
                self._prefilled.pop(request_id, None)
                self._llm.abort(request_id)
                self._notify(self._observer.on_aborted, request_id)

    def _call(self, function: Callable[[], Any], result: asyncio.Future[Any]) -> None:
        try:
            value = function()
        except EngineError as error:
            self._notify(fail, result, error)
            raise
        except Exception as error:
            self._notify(fail, result, error)
        else:
            self._notify(settle, result, value)

    def _notify(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the event loop."""
        with contextlib.suppress(RuntimeError):  # the event loop has ended
            self._loop.call_soon_threadsafe(callback, *arguments)


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, (EngineError, UserError)) else f"{type(error).__name__}: {error}"
