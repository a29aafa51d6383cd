"""The thread that alone calls an LLM."""

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
from longhelix.serve.asked import Answer, PrefillProgress, fail, settle
from longhelix.serve.refusals import ShuttingDownError

_Value = TypeVar("_Value")
_HOUR_S = 3600
_WATCH_S = 0.25  # between two looks at ranks that have nothing to do
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # before ranks that did not start are started again; each is twice the last
_OBEY_S = 0.05  # between two steps, which all requests that run wait for


@dataclass(frozen=True)
class Recovery:
    """What is done about an engine that fails: it starts again, at most `restarts` times within an hour. A request may
    have run in `failures` of them without a new token between; with one more it ends."""

    restarts: int = 3
    failures: int = 1


class Owner(Protocol):
    """Who is told, on the event loop and in the thread's order, what it does."""

    def accepted(self, answer: Answer, request_id: int) -> None:
        """The engine has the request."""

    def refused(self, answer: Answer, error: Exception) -> None:
        """The engine does not take it."""

    def left(self, answer: Answer) -> None:
        """It was aborted before the engine had it."""

    def gone(self, request_id: int) -> None:
        """The engine has aborted it."""

    def stepped(self, deltas: list[Delta], progress: dict[int, PrefillProgress], ran: list[ObservedStep]) -> None:
        """What a step gave requests, and the steps that have come back."""

    def starts_again(self, reason: str) -> None:
        """The engine has failed, and starts again."""

    def serves_again(self) -> None:
        """It serves again."""

    def has_failed(self, reason: str) -> None:
        """It has failed, and does not start again: the thread ends."""


class EngineThread:
    """Obeys the event loop between two steps, and starts an engine that fails again."""

    def __init__(self, llm: LLM, recovery: Recovery, owner: Owner) -> None:
        self._llm, self._recovery, self._owner = llm, recovery, owner
        self._failed_s: list[float] = []  # when it failed, of which it has started again
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._aborted: deque[Answer] = deque()
        self._watched: dict[int, int] = {}  # the tokens of prompts that the ranks have, by request
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # On the event loop.

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def close(self) -> None:
        """End the engine, with all that runs."""
        self._closing.set()
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._llm.close)

    def add(self, answer: Answer) -> None:
        """Ask for it."""
        self._commands.put(lambda: self._add(answer))

    def abort(self, answer: Answer) -> None:
        """End a request in any phase, before the next step, whatever else waits to be obeyed."""
        answer.aborted = True  # now, so that nothing is begun that it has asked for
        self._aborted.append(answer)

    def call(self, ask: Callable[[], _Value], seen: "asyncio.Future[_Value]") -> None:
        """What the LLM answers between two steps, or raises, comes to `seen`."""
        self._commands.put(lambda: self._call(ask, seen))

    # On the thread.

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                try:
                    self._serve()
                except Exception as error:
                    self._recover(error)
        except BaseException as error:  # whatever ends this thread, clients must hear of it
            reason = _reason(error)
            try:
                self._llm.close()
            except BaseException as again:
                reason += f"; and the engine did not close: {_reason(again)}"
            self._tell(self._owner.has_failed, reason)

    def _serve(self) -> None:
        """Until it is closed, or the engine fails."""
        while True:
            self._obey()
            if self._closing.is_set():
                return
            if self._llm.has_work:
                deltas = self._llm.step()
                progress, ran = self._progress(deltas), self._llm.ran_steps()
                self._tell(self._owner.stepped, deltas, progress, ran)

    def _recover(self, error: Exception) -> None:
        """Start an engine that has failed again, as often as it may be, or raise the error."""
        first, pause_s = _reason(error), 0.0
        while True:
            now_s = time.monotonic()
            self._failed_s = [failed_s for failed_s in self._failed_s if now_s - failed_s < _HOUR_S]
            may_start = self._llm.has_failed and len(self._failed_s) < self._recovery.restarts
            if self._closing.is_set() or not may_start:
                raise error
            self._failed_s.append(now_s)
            self._tell(self._owner.starts_again, _reason(error))
            if self._closing.wait(pause_s):
                return
            try:
                self._llm.restart(self._recovery.failures, on_load=self._check_open, on_warm_up=self._check_open)
            except ShuttingDownError:
                return
            except Exception as again:  # there may be no memory yet, or no descriptors
                error = EngineError(f"{first}; and the ranks did not start again: {_reason(again)}")
                pause_s = min(max(2 * pause_s, _PAUSE_S), _LONGEST_PAUSE_S)
            else:
                self._tell(self._owner.serves_again)
                return

    def _check_open(self, share: float) -> None:
        """Raise ShuttingDownError if nobody needs the ranks that start."""
        if self._closing.is_set():
            raise ShuttingDownError

    def _progress(self, deltas: list[Delta]) -> dict[int, PrefillProgress]:
        """How far watched prompts have come in this step."""
        for delta in deltas:
            self._watched.pop(delta.request_id, None)
        now = {request_id: self._llm.prefilled_tokens(request_id) for request_id in self._watched}
        come = {
            request_id: PrefillProgress(count) for request_id, count in now.items() if count > self._watched[request_id]
        }
        # A preempted prompt begins again.
        self._watched = {request_id: max(count, self._watched[request_id]) for request_id, count in now.items()}
        return come

    def _obey(self) -> None:
        """Do what was asked for, in order, until it has taken a while: the rest comes after the next step. Wait for
        something if there is nothing else to do."""
        self._end_aborted()
        wait_s = 0.0
        if not self._llm.has_work:
            self._llm.watch()
            wait_s = _WATCH_S
        command = self._next(wait_s)
        until_s = time.monotonic() + _OBEY_S
        while command is not None:
            command()
            command = self._next() if time.monotonic() < until_s else None
        self._end_aborted()  # meanwhile

    def _next(self, wait_s: float = 0.0) -> Callable[[], None] | None:
        """What was asked for first, once it is, in that time. None: nothing."""
        try:
            return self._commands.get(timeout=wait_s)
        except queue.Empty:
            return None

    def _add(self, answer: Answer) -> None:
        asked = answer.asked
        if answer.aborted:
            self._tell(self._owner.left, answer)
            return
        try:
            request_id = self._llm.add(
                asked.prompt,
                asked.sampling,
                asked.service,
                context=asked.context,
                arrival_s=asked.came_s,
                reasoning=asked.reasoning,
            )
        except EngineError as error:
            answer.failures += 1
            if answer.failures > self._recovery.failures:
                self._tell(self._owner.refused, answer, error)
            else:
                self.add(answer)
            raise
        except Exception as error:
            self._tell(self._owner.refused, answer, error)
            return
        answer.request_id = request_id
        if asked.watched:
            self._watched[request_id] = 0
        self._tell(self._owner.accepted, answer, request_id)

    def _end_aborted(self) -> None:
        while self._aborted:
            request_id = self._aborted.popleft().request_id
            if request_id is not None:  # or it is not begun
                self._watched.pop(request_id, None)
                self._llm.abort(request_id)
                self._tell(self._owner.gone, request_id)

    def _call(self, ask: Callable[[], Any], seen: asyncio.Future[Any]) -> None:
        try:
            found = ask()
        except EngineError as error:
            self._tell(fail, seen, error)
            raise
        except Exception as error:
            self._tell(fail, seen, error)
        else:
            self._tell(settle, seen, found)

    def _tell(self, call: Callable[..., None], *given: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody listens
            self._loop.call_soon_threadsafe(call, *given)


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, (EngineError, UserError)) else f"{type(error).__name__}: {error}"
