"""The engine on a thread of its own, for callers on an event loop."""

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, TypeVar

from longhelix.engine.llm import LLM
from longhelix.engine.observation import Observation, RanStep
from longhelix.engine.prompt import Prompt
from longhelix.engine.result import Delta
from longhelix.errors import EngineError
from longhelix.request import SamplingParams, ServiceLevel
from longhelix.serve.course import Course, NoWatch, Watch

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Limits:
    """How much may wait for its first token. requests; prompt_tokens: of all of them together."""

    requests: int
    prompt_tokens: int


@dataclass(frozen=True)
class Recovery:
    """What is done about an engine that fails: it starts again, at most `restarts` times within an hour. A request may
    have run in `failures` of them without a new token between; with one more it ends."""

    restarts: int = 3
    failures: int = 1


_RECOVERY, _HOUR_S = Recovery(), 3600
_WATCH_S = 0.25  # between two looks at ranks that have nothing to do


class OverloadedError(RuntimeError):
    """So much waits that no more is taken now."""


class RestartingError(RuntimeError):
    """The engine has failed, and starts again."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the engine has failed ({reason}) and starts again: try again later")


class ShuttingDownError(RuntimeError):
    """The server ends."""

    def __init__(self) -> None:
        super().__init__("the server is shutting down")


@dataclass(frozen=True)
class Progress:
    """How many tokens of a prompt the ranks have been given."""

    prefilled_tokens: int


@dataclass(frozen=True)
class Asked:
    """A request for the engine. num_tokens: of the prompt, and of the saved context before it. watched: its progress is
    told before its first token."""

    prompt: Prompt
    num_tokens: int
    sampling: SamplingParams
    service: ServiceLevel
    watched: bool = False
    context: str | None = None


class Answer:
    """One request on its way, which waits until it has its first token. taken: is done once the engine has taken it, or
    has the refusal."""

    def __init__(self, asked: Asked, give: Callable[["Got"], None]) -> None:
        self.asked, self.give = asked, give
        self.waits = True
        self.taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Of several refusals of one call the first is told: the others count as told, too.
        self.taken.add_done_callback(lambda taken: taken.cancelled() or taken.exception())
        # The engine thread's alone.
        self.request_id: int | None = None
        self.failures = 0  # of the engine while it was added
        self.aborted = False
        self.course = Course(asked.num_tokens, asked.sampling.max_new_tokens, time.monotonic())

    @property
    def was_refused(self) -> bool:
        return self.taken.done() and not self.taken.cancelled() and self.taken.exception() is not None


Got = Delta | Progress | Exception
Listener = Callable[[Sequence[Delta], Sequence[RanStep]], None]


class Answers:
    """What several requests get, as it comes: pairs of a request's place and what it got, until all have their results.
    The error of one is raised. Leaving the `async with` aborts those that have not ended. watch: is told of all."""

    def __init__(self, driver: "Driver", watch: Watch | None = None) -> None:
        self._driver = driver
        self._watch = NoWatch() if watch is None else watch
        self._open: dict[int, Answer] = {}
        self._got: asyncio.Queue[tuple[int, Got]] = asyncio.Queue()

    async def ask(self, requests: Sequence[Asked]) -> None:
        """Queue all of them, or none. Returns once the engine has taken them. Raises OverloadedError, EngineError once
        the engine has failed, or the UserError of a request that can never run."""
        self._driver.check_room(requests)
        for place, asked in enumerate(requests):
            self._open[place] = self._driver.add(asked, partial(self._come, place))
            self._watch.asked(self._open[place].course)
        try:
            for answer in list(self._open.values()):
                await answer.taken
        except BaseException:
            self.end()
            raise

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Delta | Progress]:
        if not self._open:
            raise StopAsyncIteration
        place, got = await self._got.get()
        if isinstance(got, Exception):
            del self._open[place]
            raise got
        if isinstance(got, Delta) and got.result is not None:
            del self._open[place]
        return place, got

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.end()

    def end(self) -> None:
        """Abort what has not ended."""
        for answer in self._open.values():
            self._driver.abort(answer)
            if not answer.was_refused:
                self._ended(answer.course, "abort")
        self._open.clear()

    def _come(self, place: int, got: Got) -> None:
        answer = self._open.get(place)
        if answer is not None and isinstance(got, Delta):
            self._watch.came(answer.course, got)
        elif answer is not None and isinstance(got, Exception):
            self._ended(answer.course, "abort" if isinstance(got, ShuttingDownError) else "error")
        self._got.put_nowait((place, got))

    def _ended(self, course: Course, reason: str) -> None:
        if not course.has_ended:
            self._watch.ended(course, reason)


class Driver:
    """Runs an LLM. Its thread alone calls the LLM; what requests get goes to the event loop that `start` is called on,
    and all methods are called there.

    listeners: are told, on the event loop, what steps gave requests, and the steps that have come back; on_restart,
    on_failure: why the engine has failed, and starts again or not.
    An engine that fails starts again, and its requests go on. One that fails too often, or cannot start, ends all
    requests with the reason, and takes no more. restarting, failure: the reasons, while that is so.
    """

    def __init__(self, llm: LLM, limits: Limits, recovery: Recovery = _RECOVERY) -> None:
        self.failure = self.restarting = ""
        self.restarts = 0
        self.listeners: list[Listener] = []
        self.on_restart: Callable[[str], None] = lambda reason: None
        self.on_failure: Callable[[str], None] = lambda reason: None
        self.steps = 0
        self.last_step_s = time.monotonic()
        self._llm, self._limits, self._recovery = llm, limits, recovery
        self._failed_s: list[float] = []  # when it failed, of which it has started again
        self._answers: dict[int, Answer] = {}
        self._observers: set[asyncio.Future[Any]] = set()
        self._asked: set[Answer] = set()  # those that the engine does not know yet
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._watched: dict[int, int] = {}  # the tokens of prompts that the ranks have, by request
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def observe(self) -> Observation:
        """What the engine does, between two steps. Raises EngineError if it fails before."""
        return await self.call(self._llm.observe)

    async def call(self, ask: Callable[[], _Value]) -> _Value:
        """What the LLM answers, between two steps. Raises what it raises, or EngineError if it fails before."""
        seen: asyncio.Future[Any] = self._loop.create_future()
        self._check_running()
        self._observers.add(seen)
        self._commands.put(lambda: self._call(ask, seen))
        try:
            return await seen
        finally:
            self._observers.discard(seen)

    async def close(self) -> None:
        """End what runs, and the engine."""
        self._closing = True
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.to_thread(self._llm.close)

    @property
    def is_idle(self) -> bool:
        """Whether no request is left, and no context to be saved."""
        return not (self._asked or self._answers or self._llm.is_saving)

    def end_all(self, error: Exception) -> None:
        """Abort all requests, which get this error, and so does who looks at the engine."""
        for seen in self._observers:
            _fail(seen, error)
        for answer in (*self._asked, *self._answers.values()):
            self._end(answer, error)
            self.abort(answer)
        self._asked.clear()
        self._answers.clear()

    @property
    def still_s(self) -> float:
        """For how long no rank has got on, in the step that runs."""
        return self._llm.still_s

    @property
    def most_requests(self) -> int:
        """That may wait."""
        return self._limits.requests

    @property
    def running(self) -> int:
        """Requests that have their first token."""
        return sum(not answer.waits for answer in self._answers.values())

    @property
    def waiting(self) -> list[Asked]:
        """Requests without a first token."""
        return [answer.asked for answer in (*self._asked, *self._answers.values()) if answer.waits]

    def check_room(self, requests: Sequence[Asked]) -> None:
        """Raise OverloadedError if so many more may not wait, RestartingError or EngineError if the engine has failed.
        One request alone may be of any length."""
        self._check_running()
        waiting = self.waiting
        before, more = (sum(asked.num_tokens for asked in some) for some in (waiting, requests))
        alone = not waiting and len(requests) == 1
        tokens_beyond = not alone and before + more > self._limits.prompt_tokens
        if len(waiting) + len(requests) > self._limits.requests or tokens_beyond:
            raise OverloadedError(f"{len(waiting)} requests with {before} prompt tokens wait already: try again later")

    def _check_running(self) -> None:
        if self.failure:
            raise EngineError(self.failure)
        if self.restarting:
            raise RestartingError(self.restarting)

    def add(self, asked: Asked, give: Callable[[Got], None]) -> Answer:
        """Queue a request. A refusal is what its answer gets."""
        answer = Answer(asked, give)
        self._asked.add(answer)
        self._commands.put(lambda: self._add(answer))
        return answer

    def abort(self, answer: Answer) -> None:
        """End a request in any phase."""
        self._commands.put(lambda: self._abort(answer))

    # On the engine's thread.

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._serve()
                except Exception as error:
                    self._recover(error)
        except Exception as error:
            self._llm.close()
            reason = _reason(error)
            self._tell(lambda: self._failed(reason))

    def _serve(self) -> None:
        """Until it is closed, or the engine fails."""
        while True:
            self._obey()
            if self._closing:
                return
            if self._llm.has_work:
                deltas = self._llm.step()
                progress, ran = self._progress(deltas), self._llm.ran_steps()
                self._tell(partial(self._stepped, deltas, progress, ran))

    def _recover(self, error: Exception) -> None:
        """Start an engine that has failed again, as often as it may be, or raise the error."""
        first = reason = _reason(error)
        while True:
            now_s = time.monotonic()
            self._failed_s = [failed_s for failed_s in self._failed_s if now_s - failed_s < _HOUR_S]
            if self._closing or not self._llm.has_failed or len(self._failed_s) >= self._recovery.restarts:
                raise error
            self._failed_s.append(now_s)
            self._tell(partial(self._restarts, reason))
            try:
                self._llm.restart(self._recovery.failures, on_load=self._check_open, on_warm_up=self._check_open)
            except ShuttingDownError:
                return
            except EngineError as again:
                reason = f"{first}; and the ranks did not start again: {again}"
                error = EngineError(reason)
            else:
                self._tell(self._restarted)
                return

    def _check_open(self, share: float) -> None:
        """Raise ShuttingDownError if nobody needs the ranks that start."""
        if self._closing:
            raise ShuttingDownError

    def _progress(self, deltas: list[Delta]) -> dict[int, Progress]:
        """How far watched prompts have come in this step."""
        for delta in deltas:
            self._watched.pop(delta.request_id, None)
        now = {request_id: self._llm.prefilled_tokens(request_id) for request_id in self._watched}
        come = {request_id: Progress(count) for request_id, count in now.items() if count > self._watched[request_id]}
        # A preempted prompt begins again.
        self._watched = {request_id: max(count, self._watched[request_id]) for request_id, count in now.items()}
        return come

    def _obey(self) -> None:
        """Do what was asked for; wait for something if there is nothing else to do."""
        if not self._llm.has_work:
            self._llm.watch()
            with contextlib.suppress(queue.Empty):
                self._commands.get(timeout=_WATCH_S)()
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command()

    def _add(self, answer: Answer) -> None:
        asked = answer.asked
        if answer.aborted:
            self._tell(lambda: self._asked.discard(answer))
            return
        try:
            request_id = self._llm.add(asked.prompt, asked.sampling, asked.service, context=asked.context)
        except EngineError as error:
            answer.failures += 1
            if answer.failures > self._recovery.failures:
                refusal: Exception = error
                self._tell(lambda: self._refused(answer, refusal))
            else:
                self._commands.put(lambda: self._add(answer))
            raise
        except Exception as error:
            refusal = error
            self._tell(lambda: self._refused(answer, refusal))
            return
        answer.request_id = request_id
        if asked.watched:
            self._watched[request_id] = 0
        self._tell(lambda: self._accepted(answer, request_id))

    def _abort(self, answer: Answer) -> None:
        answer.aborted = True
        request_id = answer.request_id
        if request_id is not None:
            self._watched.pop(request_id, None)
            self._llm.abort(request_id)
            self._tell(lambda: self._gone(request_id))

    def _call(self, ask: Callable[[], Any], seen: asyncio.Future[Any]) -> None:
        try:
            found = ask()
        except EngineError as error:
            failure = error
            self._tell(lambda: _fail(seen, failure))
            raise
        except Exception as error:
            refusal = error
            self._tell(lambda: _fail(seen, refusal))
        else:
            self._tell(lambda: _settle(seen, found))

    def _tell(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody listens
            self._loop.call_soon_threadsafe(call)

    # On the event loop, in the order of the engine's thread.

    def _accepted(self, answer: Answer, request_id: int) -> None:
        if answer in self._asked:  # or all have been ended
            self._asked.remove(answer)
            answer.asked = replace(answer.asked, prompt=())  # which the engine has
            self._answers[request_id] = answer
            _settle(answer.taken, None)

    def _refused(self, answer: Answer, error: Exception) -> None:
        self._asked.discard(answer)
        _fail(answer.taken, error)

    def _gone(self, request_id: int) -> None:
        self._answers.pop(request_id, None)

    def _stepped(self, deltas: list[Delta], progress: dict[int, Progress], ran: list[RanStep]) -> None:
        self.steps += len(ran)
        self.last_step_s = time.monotonic()
        self._begin(ran)
        for hear in self.listeners:
            hear(deltas, ran)
        for request_id, come in progress.items():
            if request_id in self._answers:  # or it was aborted meanwhile
                self._answers[request_id].give(come)
        for delta in deltas:
            answer = self._answers.get(delta.request_id)
            if answer is None:
                continue
            answer.waits = False
            answer.give(delta)
            if delta.result is not None:
                self._gone(delta.request_id)

    def _begin(self, ran: list[RanStep]) -> None:
        """Say of requests when their first step began."""
        for step in ran:
            for chunk in step.chunks:
                if chunk.request_id in self._answers:
                    self._answers[chunk.request_id].course.began(self.last_step_s - step.taken_s)

    def _restarts(self, reason: str) -> None:
        self.restarting = reason
        self.restarts += 1
        self.on_restart(reason)

    def _restarted(self) -> None:
        self.restarting = ""
        self.last_step_s = time.monotonic()

    def _failed(self, reason: str) -> None:
        self.failure, self.restarting = reason, ""
        self.on_failure(reason)
        self.end_all(EngineError(reason))

    def _end(self, answer: Answer, error: Exception) -> None:
        if answer in self._asked:
            _fail(answer.taken, error)
        else:
            answer.give(error)


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"


def _settle(future: asyncio.Future[_Value], value: _Value) -> None:
    """Unless whoever waited for it has gone."""
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[_Value], error: Exception) -> None:
    """Likewise."""
    if not future.done():
        future.set_exception(error)
