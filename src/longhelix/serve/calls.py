"""One HTTP request from its first byte to its last: its id, what the engine did for it, its line in the journal."""

import secrets
import time
from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longhelix.engine.result import Delta
from longhelix.serve.course import Course
from longhelix.serve.journal import Journal
from longhelix.serve.metrics import Metrics
from longhelix.serve.traces import Traces

_ID_HEADER = b"x-request-id"


class EngineCall:
    """id: of our own making, whatever a client sends. code: of the error that it was answered with. ends: are called
    once it is over, and end what nobody has come to ending. It watches how the requests for the engine go that it
    became."""

    def __init__(self, metrics: Metrics) -> None:
        self.id = secrets.token_hex(12)
        self.came_s = time.monotonic()
        self.status = 500  # unless an answer begins
        self.code = ""
        self.courses: list[Course] = []
        self.ends: list[Callable[[], None]] = []
        self._metrics = metrics

    def asked(self, course: Course) -> None:
        self.courses.append(course)

    def taken(self, course: Course) -> None:
        self._metrics.taken(course)

    def came(self, course: Course, delta: Delta) -> None:
        self._metrics.came(course, delta)

    def ended(self, course: Course, reason: str) -> None:
        self._metrics.ended(course, reason)


_CURRENT: ContextVar[EngineCall | None] = ContextVar("call", default=None)


def current() -> EngineCall | None:
    """That which runs here; None outside of any."""
    return _CURRENT.get()


class Calls:
    """Gives each HTTP request its `EngineCall` and answers with its id, before anything else sees it.

    It counts refusals, and writes a log line for each request that went to the engine or was refused, and a span if
    traces are on.

    Args:
        paths: the paths that log lines may name. Clients cannot add to them.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, journal: Journal, traces: Traces | None, paths: Collection[str]
    ) -> None:
        self._app, self._metrics, self._journal, self._traces = app, metrics, journal, traces
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = EngineCall(self._metrics)

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                message = message | {"headers": [*message.get("headers", ()), (_ID_HEADER, call.id.encode())]}
            await send(message)

        token = _CURRENT.set(call)
        try:
            await self._app(scope, receive, marked)
        finally:
            _CURRENT.reset(token)
            for end in call.ends:
                end()
            self._end(scope, call)

    def _end(self, scope: Scope, call: EngineCall) -> None:
        if call.status >= 400:
            self._metrics.refused(call.status, call.code)
        if call.courses or call.status >= 400:
            facts = self._facts(scope, call)
            self._journal.tell("request", **facts)
            if call.courses and self._traces is not None:
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
                self._traces.tell(headers, facts, call.courses, call.came_s)

    def _facts(self, scope: Scope, call: EngineCall) -> dict[str, str | int | float | None]:
        """Tokens are those of all its requests together; times count from its coming, that of the first token to the
        first of any."""
        route = getattr(scope.get("route"), "path_format", scope["path"])
        facts: dict[str, str | int | float | None] = {
            "id": call.id,
            "route": route if route in self._paths else "other",
            "status": call.status,
            "code": call.code or None,
        }
        courses = call.courses
        if courses:
            results = [course.result for course in courses if course.result is not None]
            facts |= {
                "requests": len(courses),
                "prompt_tokens": sum(course.prompt_tokens for course in courses),
                "new_tokens": sum(course.new_tokens for course in courses),
                "cached_tokens": sum(result.cached_tokens for result in results),
                "finish_reason": ",".join(sorted({course.reason for course in courses if course.has_ended})) or None,
                "queue_s": _least([course.begun_s for course in courses], call.came_s),
                "ttft_s": _least([course.first_s for course in courses], call.came_s),
            }
        return facts | {"duration_s": time.monotonic() - call.came_s}


def _least(times_s: Iterable[float | None], came_s: float) -> float | None:
    """The first of some times, from the call's coming on."""
    return min((time_s - came_s for time_s in times_s if time_s is not None), default=None)
