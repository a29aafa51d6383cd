"""Responses that send answers as one JSON document, or token by token as server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from longhelix.engine.result import Delta, Result
from longhelix.errors import RequestError
from longhelix.serve.answer_format import AnswerFormat, data_line
from longhelix.serve.driver import RequestGroup
from longhelix.serve.engine_request import IdleNotice, PrefillProgress
from longhelix.serve.errors import DisconnectedError

KEEP_ALIVE_S = 10.0
_PART_BYTES = 1 << 18  # minimum size of each part of a long answer
Run = Callable[..., Awaitable[Any]]
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """Response of server-sent events.

    Args:
        resources: closed when the response ends for any reason, even if it has not begun.
        lines: text of the events.
    """

    def __init__(self, resources: AbstractAsyncContextManager[object], lines: AsyncIterator[str]) -> None:
        super().__init__(lines, media_type="text/event-stream", headers=_HEADERS)
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._resources:
            await super().__call__(scope, receive, send)


class LongJson(Response):
    """JSON response that is encoded in pieces while it is sent, so that memory never contains all of a long response.

    Args:
        pieces: pieces of the JSON, in order.
        run: calls a function off the event loop.
    """

    media_type = "application/json"

    def __init__(self, pieces: Iterator[bytes], run: Run) -> None:
        super().__init__()
        self._pieces, self._run = pieces, run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        first = await self._run(_next_part, self._pieces)
        if len(first) < _PART_BYTES:  # the first part is the complete response
            await Response(first, media_type=self.media_type)(scope, receive, send)
        else:
            await StreamingResponse(self._parts(first), media_type=self.media_type)(scope, receive, send)

    async def _parts(self, first: bytes) -> AsyncIterator[bytes]:
        part = first
        while part:
            yield part
            part = await self._run(_next_part, self._pieces)


def _next_part(pieces: Iterator[bytes]) -> bytes:
    """Return the next part: pieces joined until they have at least 256 KiB. The last part may be shorter."""
    part = bytearray()
    for piece in pieces:
        part += piece
        if len(part) >= _PART_BYTES:
            break
    return bytes(part)


class _Whole(Response):
    """Response with the complete answer. The JSON may be large, so a thread encodes it."""

    def __init__(self, group: RequestGroup, form: AnswerFormat) -> None:
        super().__init__()
        self._group, self._form = group, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        results = await collect(self._group, receive)
        await LongJson(self._form.pieces(results), self._form.run)(scope, receive, send)


def answer(group: RequestGroup, form: AnswerFormat) -> Response:
    """Return a streamed or a complete response, as specified by the request body.

    The response waits for the engine while it is sent. At that time, the body is no longer in memory (see `BodyRoute`).
    """
    return stream(group, form) if form.body.stream else _Whole(group, form)


def stream(group: RequestGroup, form: AnswerFormat) -> StreamingResponse:
    """Return a streamed response.

    The last event reports the error, if there is one. Comments keep the connection alive while there are no events.
    Clients that request progress receive events with the prefill progress. If the client disconnects, all requests are
    aborted.
    """

    async def lines() -> AsyncIterator[str]:
        idle_timer = _IdleTimer(group)
        try:
            async for line in _first(form):
                yield line
            idle_timer.restart()
            async for place, update in group:
                for line in _lines(form, place, update):
                    yield line
                    idle_timer.restart()
            for event in form.last():
                yield form.line(event)
        except Exception as error:
            yield form.error_line(error)
        finally:
            idle_timer.stop()
        if form.end:
            yield form.end

    return EventStream(group, lines())


async def _first(form: AnswerFormat) -> AsyncIterator[str]:
    """Yield the text of the events before the first token, in pieces if they are long."""
    if not form.is_long:
        for event in form.first():
            yield form.line(event)
        return
    events = form.first()
    while (event := await form.run(next, events, None)) is not None:
        pieces = form.event_line_pieces(event)
        while part := await form.run(_next_part, pieces):
            yield part.decode()


class _IdleTimer:
    """Notifies a request group whenever no line has been sent for `KEEP_ALIVE_S`, until its requests end.

    Hundreds of lines may be sent per second, so `restart` only records the time. A single timer checks this time.
    """

    def __init__(self, group: RequestGroup) -> None:
        self._group = group
        self._clock = asyncio.get_running_loop().time
        self._timer: asyncio.TimerHandle | None = None

    def restart(self) -> None:
        """Record that a line has been sent."""
        self._since_s = self._clock()
        if self._timer is None:
            self._check()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check(self) -> None:
        self._timer = None
        if not self._group.is_open:
            return
        now_s = self._clock()
        if now_s >= self._since_s + KEEP_ALIVE_S:
            self._group.notify_idle()
            self._since_s = now_s
        self._timer = asyncio.get_running_loop().call_at(self._since_s + KEEP_ALIVE_S, self._check)


def _lines(form: AnswerFormat, place: int, update: Delta | PrefillProgress | IdleNotice) -> list[str]:
    """Return the text of the events for an update. Raises RequestError if the request failed."""
    if isinstance(update, IdleNotice):
        return [": the answer is under way\n\n"]
    if isinstance(update, PrefillProgress):
        counts = {"prefilled_tokens": update.prefilled_tokens, "prompt_tokens": form.requests[place].num_tokens}
        return [f"event: progress\n{data_line({'index': place} | counts)}"]
    check(update.result)
    return [form.line(event) for event in form.events(place, update)]


async def collect(group: RequestGroup, receive: Receive) -> list[Result]:
    """Wait for all requests and return their results in order.

    Raises:
        DisconnectedError: the client has disconnected. All requests are aborted.
        RequestError: a request failed. The other requests are aborted.
    """
    results: dict[int, Result] = {}

    async def run() -> None:
        async for place, update in group:
            if isinstance(update, Delta) and update.result is not None:
                check(update.result)
                results[place] = update.result

    async with group:
        running, leaving = asyncio.create_task(run()), asyncio.create_task(disconnected(receive))
        try:
            await asyncio.wait((running, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise DisconnectedError
            await running
        finally:
            running.cancel()
            leaving.cancel()
    return [results[place] for place in sorted(results)]


def check(result: Result | None) -> None:
    """Raise RequestError if the result reports an error."""
    if result is not None and result.finish_reason == "error":
        raise RequestError(f"the request failed: {result.error}")


async def disconnected(receive: Receive) -> None:
    """Wait until the client disconnects. Call this function after the body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
