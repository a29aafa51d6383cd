"""Answers as clients get them: whole, or as server-sent events that come token by token."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from longhelix.engine.result import Delta, Result
from longhelix.errors import RequestError
from longhelix.serve.asked import PrefillProgress, Quiet
from longhelix.serve.driver import Answers
from longhelix.serve.errors import DisconnectedError
from longhelix.serve.form import Form, data_line

KEEP_ALIVE_S = 10.0
_PART_BYTES = 1 << 18  # of a long answer
Make = Callable[..., Awaitable[Any]]
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """Server-sent events. What it holds is let go of however it ends itself, even before it has begun."""

    def __init__(self, holds: AbstractAsyncContextManager[object], lines: AsyncIterator[str]) -> None:
        super().__init__(lines, media_type="text/event-stream", headers=_HEADERS)
        self._holds = holds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._holds:
            await super().__call__(scope, receive, send)


class LongJson(Response):
    """JSON that is made piece by piece, and sent as it is made: no more of it is in memory than the client leaves
    there. It is sent in one go where it is short.

    make: runs a function off the event loop.
    """

    media_type = "application/json"

    def __init__(self, pieces: Iterator[bytes], make: Make) -> None:
        super().__init__()
        self._pieces, self._make = pieces, make

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = await self._make(_next_part, self._pieces)
        if len(begun) < _PART_BYTES:
            await Response(begun, media_type=self.media_type)(scope, receive, send)
        else:
            await StreamingResponse(self._parts(begun), media_type=self.media_type)(scope, receive, send)

    async def _parts(self, begun: bytes) -> AsyncIterator[bytes]:
        part = begun
        while part:
            yield part
            part = await self._make(_next_part, self._pieces)


def _next_part(pieces: Iterator[bytes]) -> bytes:
    """As many of the next pieces as have 256 KiB together; fewer only at the end."""
    part = bytearray()
    for piece in pieces:
        part += piece
        if len(part) >= _PART_BYTES:
            break
    return bytes(part)


class _Whole(Response):
    """An answer in one piece. Its JSON is made off the event loop: it may be large."""

    def __init__(self, answers: Answers, form: Form) -> None:
        super().__init__()
        self._answers, self._form = answers, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        results = await collect(self._answers, receive)
        await LongJson(self._form.pieces(results), self._form.make)(scope, receive, send)


def answer(answers: Answers, form: Form) -> Response:
    """As its request wants it. The engine is waited for where it is sent, when the request's body is no longer kept
    (see `BodyRoute`)."""
    return stream(answers, form) if form.body.stream else _Whole(answers, form)


def stream(answers: Answers, form: Form) -> StreamingResponse:
    """A form's events as they come, and its end. An error of a request is an event too, the last one. Comments keep the
    connection alive while nothing else is sent; prompts that are watched have an event of their progress. A client that
    goes away aborts all."""

    async def lines() -> AsyncIterator[str]:
        silence = _Silence(answers)
        try:
            async for line in _first(form):
                yield line
            silence.begin()
            async for place, got in answers:
                for line in _lines(form, place, got):
                    yield line
                    silence.begin()
            for event in form.last():
                yield form.line(event)
        except Exception as error:
            yield form.error_line(error)
        finally:
            silence.end()
        if form.end:
            yield form.end

    return EventStream(answers, lines())


async def _first(form: Form) -> AsyncIterator[str]:
    """The lines before anything has come, in pieces where they are long."""
    if not form.is_long:
        for event in form.first():
            yield form.line(event)
        return
    events = form.first()
    while (event := await form.make(next, events, None)) is not None:
        pieces = form.pieces_of_line(event)
        while part := await form.make(_next_part, pieces):
            yield part.decode()


class _Silence:
    """Gives who takes answers a `Quiet` once no line has been sent for a while, and again after as long, until they are
    over. One timer looks at what each line only writes down: lines come by the hundred in a second."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._clock = asyncio.get_running_loop().time
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """A line has been sent."""
        self._since_s = self._clock()
        if self._timer is None:
            self._look()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer = None
        if not self._answers.are_open:
            return
        now_s = self._clock()
        if now_s >= self._since_s + KEEP_ALIVE_S:
            self._answers.tell_quiet()
            self._since_s = now_s
        self._timer = asyncio.get_running_loop().call_at(self._since_s + KEEP_ALIVE_S, self._look)


def _lines(form: Form, place: int, got: Delta | PrefillProgress | Quiet) -> list[str]:
    """Those of what a request got. Raises the error of one that failed."""
    if isinstance(got, Quiet):
        return [": the answer is under way\n\n"]
    if isinstance(got, PrefillProgress):
        told = {"prefilled_tokens": got.prefilled_tokens, "prompt_tokens": form.asked[place].num_tokens}
        return [f"event: progress\n{data_line({'index': place} | told)}"]
    check(got.result)
    return [form.line(event) for event in form.events(place, got)]


async def collect(answers: Answers, receive: Receive) -> list[Result]:
    """The results of all requests, in their order. Raises DisconnectedError once the client has gone, or the error of
    one; both abort the others."""
    results: dict[int, Result] = {}

    async def run() -> None:
        async for place, got in answers:
            if isinstance(got, Delta) and got.result is not None:
                check(got.result)
                results[place] = got.result

    async with answers:
        running, leaving = asyncio.create_task(run()), asyncio.create_task(gone(receive))
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
    """Raise RequestError for a request that failed."""
    if result is not None and result.finish_reason == "error":
        raise RequestError(f"the request failed: {result.error}")


async def gone(receive: Receive) -> None:
    """Returns once the client has gone, after the body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass
