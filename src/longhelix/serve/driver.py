"""The engine on a thread of its own, for callers on an event loop."""

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
from longhelix.serve.asked import Answer, Asked, Got, PrefillProgress, Quiet, fail, settle
from longhelix.serve.course import Course, NoWatch, RequestObserver
from longhelix.serve.engine_thread import EngineThread, Recovery
from longhelix.serve.refusals import OverloadedError, RestartingError, ShuttingDownError

_Value = TypeVar("_Value")
_RECOVERY = Recovery()
Listener = Callable[[Sequence[Delta], Sequence[ObservedStep]], None]


@dataclass(frozen=True)
class Limits:
    """How much may wait for its first token. requests; prompt_tokens: of all of them together."""

    requests: int
    prompt_tokens: int


class Answers:
    """What several requests get, as it comes: pairs of a request's place and what it got, until all have their results;
    or of 0 and `Quiet`. The error of one is raised. Leaving the `async with` aborts those that have not ended. watch:
    is told of all."""

    def __init__(self, driver: "Driver", watch: RequestObserver | None = None) -> None:
        self._driver = driver
        self._watch = NoWatch() if watch is None else watch
        self._open: dict[int, Answer] = {}
        self._got: asyncio.Queue[tuple[int, Got | Quiet]] = asyncio.Queue()
        self._quiet_waits = False

    async def ask(self, requests: Sequence[Asked]) -> None:
        """Queue all of them, or none. Returns once the engine has taken them. Raises OverloadedError, EngineError once
        the engine has failed, or the UserError of a request that can never run."""
        self._driver.check_room([asked.num_tokens for asked in requests])
        for place, asked in enumerate(requests):
            self._open[place] = self._driver.add(asked, partial(self._come, place))
            self._watch.asked(self._open[place].course)
        answers = list(self._open.values())
        try:
            for answer in answers:
                await answer.taken
        except BaseException:
            self.end()
            raise
        for answer in answers:
            self._watch.taken(answer.course)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Delta | PrefillProgress | Quiet]:
        if not self._open:
            raise StopAsyncIteration
        place, got = await self._got.get()
        if isinstance(got, Quiet):
            self._quiet_waits = False
        if isinstance(got, Exception):
            del self._open[place]
            raise got
        if isinstance(got, Delta) and got.result is not None:
            del self._open[place]
        return place, got

    @property
    def are_open(self) -> bool:
        """Whether something is yet to come, or to be taken."""
        return bool(self._open)

    def tell_quiet(self) -> None:
        """Give `Quiet`, unless one waits already that nobody has taken."""
        if not self._quiet_waits:
            self._quiet_waits = True
            self._got.put_nowait((0, Quiet()))

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
        self._llm, self._limits = llm, limits
        self._engine = EngineThread(llm, recovery, self)
        self._answers: dict[int, Answer] = {}
        self._observers: set[asyncio.Future[Any]] = set()
        self._asked: set[Answer] = set()  # those that the engine does not know yet

    def start(self) -> None:
        self._engine.start()

    async def observe(self) -> Observation:
        """What the engine does, between two steps. Raises EngineError if it fails before."""
        return await self.call(self._llm.observe)

    async def call(self, ask: Callable[[], _Value]) -> _Value:
        """What the LLM answers, between two steps. Raises what it raises, or EngineError if it fails before."""
        seen: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._check_running()
        self._observers.add(seen)
        self._engine.call(ask, seen)
        try:
            return await seen
        finally:
            self._observers.discard(seen)

    async def close(self) -> None:
        """End what runs, and the engine."""
        await self._engine.close()

    @property
    def is_idle(self) -> bool:
        """Whether no request is left, and no context to be saved."""
        return not (self._asked or self._answers or self._llm.is_saving)

    def end_all(self, error: Exception) -> None:
        """Abort all requests, which get this error, and so does who looks at the engine."""
        for seen in self._observers:
            fail(seen, error)
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
    def request_ids(self) -> Set[int]:
        """Of all that the engine has for somebody: contexts that are saved run beside them."""
        return self._answers.keys()

    @property
    def running(self) -> int:
        """Requests that have their first token."""
        return sum(not answer.waits for answer in self._answers.values())

    @property
    def waiting(self) -> list[Asked]:
        """Requests without a first token."""
        return [answer.asked for answer in (*self._asked, *self._answers.values()) if answer.waits]

    def check_room(self, lengths: Sequence[int]) -> None:
        """Raise OverloadedError if requests of so many prompt tokens may not wait besides, RestartingError or
        EngineError if the engine has failed. One request alone may be of any length."""
        self._check_running()
        waiting = self.waiting
        before = sum(asked.num_tokens for asked in waiting)
        alone = not waiting and len(lengths) == 1
        tokens_beyond = not alone and before + sum(lengths) > self._limits.prompt_tokens
        if len(waiting) + len(lengths) > self._limits.requests or tokens_beyond:
            raise OverloadedError(f"{len(waiting)} requests with {before} prompt tokens are waiting: try again later")

    def _check_running(self) -> None:
        if self.failure:
            raise EngineError(self.failure)
        if self.restarting:
            raise RestartingError

    def add(self, asked: Asked, give: Callable[[Got], None]) -> Answer:
        """Queue a request. A refusal is what its answer gets."""
        answer = Answer(asked, give)
        self._asked.add(answer)
        self._engine.add(answer)
        return answer

    def abort(self, answer: Answer) -> None:
        """End a request in any phase."""
        self._engine.abort(answer)

    # What the thread tells, as an Owner of it.

    def accepted(self, answer: Answer, request_id: int) -> None:
        if answer in self._asked:  # or all have been ended
            self._asked.remove(answer)
            answer.asked = replace(answer.asked, prompt=(), context=None)  # which the engine has
            self._answers[request_id] = answer
            settle(answer.taken, None)

    def refused(self, answer: Answer, error: Exception) -> None:
        self._asked.discard(answer)
        fail(answer.taken, error)

    def left(self, answer: Answer) -> None:
        self._asked.discard(answer)

    def gone(self, request_id: int) -> None:
        self._answers.pop(request_id, None)

    def stepped(self, deltas: list[Delta], progress: dict[int, PrefillProgress], ran: list[ObservedStep]) -> None:
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
                self.gone(delta.request_id)

    def _begin(self, ran: list[ObservedStep]) -> None:
        """Say of requests when their first step began."""
        for step in ran:
            for chunk in step.chunks:
                if chunk.request_id in self._answers:
                    self._answers[chunk.request_id].course.began(self.last_step_s - step.taken_s)

    def starts_again(self, reason: str) -> None:
        self.restarting = reason
        self.restarts += 1
        self.on_restart(reason)

    def serves_again(self) -> None:
        self.restarting = ""
        self.last_step_s = time.monotonic()

    def has_failed(self, reason: str) -> None:
        self.failure, self.restarting = reason, ""
        self.on_failure(reason)
        self.end_all(EngineError(reason))

    def _end(self, answer: Answer, error: Exception) -> None:
        if answer in self._asked:
            fail(answer.taken, error)
        else:
            answer.give(error)
