"""Tracks each HTTP request from arrival to end: its id, its engine requests and its log line."""

import secrets
import time
from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longhelix.engine.result import Delta
from longhelix.serve.metrics import Metrics
from longhelix.serve.request_progress import RequestProgress
from longhelix.serve.server_log import ServerLog
from longhelix.serve.traces import Traces

_ID_HEADER = b"x-request-id"


class EngineCall:
    """One HTTP request and the progress of its engine requests. It is also their `RequestObserver`."""

    def __init__(self, metrics: Metrics) -> None:
        self.id = secrets.token_hex(12)  # the server chooses the id and ignores any id that the client sends
        self.arrival_s = time.monotonic()
        self.status = 500  # this value applies until a response begins
        self.code = ""  # error code of the response
        self.requests: list[RequestProgress] = []
        self.cleanups: list[Callable[[], None]] = []  # called when the HTTP request has ended
        self._metrics = metrics

    def on_queued(self, progress: RequestProgress) -> None:
        self.requests.append(progress)

    def on_accepted(self, progress: RequestProgress) -> None:
        self._metrics.on_accepted(progress)

    def on_delta(self, progress: RequestProgress, delta: Delta) -> None:
        self._metrics.on_delta(progress, delta)

    def on_ended(self, progress: RequestProgress, reason: str) -> None:
        self._metrics.on_ended(progress, reason)


_CURRENT: ContextVar[EngineCall | None] = ContextVar("call", default=None)


def current() -> EngineCall | None:
    """Return the HTTP request that the running task serves, or None if it serves none."""
    return _CURRENT.get()


class CallMiddleware:
    """Outermost middleware. It creates the `EngineCall` of each HTTP request and adds the call's id to the response.

    It also counts error responses. For each request that went to the engine or failed, it writes a log line. For each
    request that went to the engine, it also records a span if tracing is enabled.

    Args:
        paths: the paths that log lines may name. All other paths are logged as `other`.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, log: ServerLog, traces: Traces | None, paths: Collection[str]
    ) -> None:
        self._app, self._metrics, self._log, self._traces = app, metrics, log, traces
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
            for cleanup in call.cleanups:
                cleanup()
            self._end(scope, call)

    def _end(self, scope: Scope, call: EngineCall) -> None:
        if call.status >= 400:
            self._metrics.on_refused(call.status, call.code)
        if call.requests or call.status >= 400:
            facts = self._facts(scope, call)
            self._log.write("request", **facts)
            if call.requests and self._traces is not None:
                headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
                self._traces.record(headers, facts, call.requests, call.arrival_s)

    def _facts(self, scope: Scope, call: EngineCall) -> dict[str, str | int | float | None]:
        """Return the fields of the log line.

        Token counts are sums over all engine requests of the call. Times are measured from the call's arrival. The
        queue time ends with the first step of any of these requests, and the TTFT ends with the first token of any.
        """
        route = getattr(scope.get("route"), "path_format", scope["path"])
        facts: dict[str, str | int | float | None] = {
            "id": call.id,
            "route": route if route in self._paths else "other",
            "status": call.status,
            "code": call.code or None,
        }
        requests = call.requests
        if requests:
            results = [progress.result for progress in requests if progress.result is not None]
            facts |= {
                "requests": len(requests),
                "prompt_tokens": sum(progress.prompt_tokens for progress in requests),
                "new_tokens": sum(progress.new_tokens for progress in requests),
                "cached_tokens": sum(result.cached_tokens for result in results),
                "finish_reason": ",".join(sorted({progress.reason for progress in requests if progress.has_ended}))
                or None,
                "queue_s": _first_after([progress.first_step_s for progress in requests], call.arrival_s),
                "ttft_s": _first_after([progress.first_token_s for progress in requests], call.arrival_s),
            }
        return facts | {"duration_s": time.monotonic() - call.arrival_s}


def _first_after(times_s: Iterable[float | None], arrival_s: float) -> float | None:
    """Return the time from the arrival to the earliest of `times_s`, or None if every entry is None."""
    return min((time_s - arrival_s for time_s in times_s if time_s is not None), default=None)
