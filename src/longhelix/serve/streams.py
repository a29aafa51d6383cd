"""Server-sent events of answers that come token by token."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from longhelix.engine.result import Delta, Result
from longhelix.errors import RequestError
from longhelix.serve.driver import Answers, Progress
from longhelix.serve.errors import DisconnectedError, of_error
from longhelix.serve.form import Form

KEEP_ALIVE_S = 10.0
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class _Stream(StreamingResponse):
    """Ends its answers however it ends itself, even before it has begun."""

    def __init__(self, answers: Answers, lines: AsyncIterator[str]) -> None:
        super().__init__(lines, media_type="text/event-stream", headers=HEADERS)
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._answers:
            await super().__call__(scope, receive, send)


def stream(answers: Answers, form: Form) -> StreamingResponse:
    """Events of JSON as they come, and [DONE]. An error of a request is an event too, the last one. Comments keep the
    connection alive while a prompt is long; prompts that are watched have an event of their progress. A client that
    goes away aborts all."""

    async def lines() -> AsyncIterator[str]:
        try:
            for event in form.first():
                yield _line(event)
            while True:
                try:
                    async with asyncio.timeout(KEEP_ALIVE_S):
                        place, got = await anext(answers)
                except TimeoutError:
                    yield ": the prompt is being read\n\n"
                    continue
                except StopAsyncIteration:
                    break
                if isinstance(got, Progress):
                    told = {"prefilled_tokens": got.prefilled_tokens, "prompt_tokens": form.asked[place].num_tokens}
                    yield "event: progress\n" + _line({"index": place} | told)
                    continue
                check(got.result)
                for event in form.events(place, got):
                    yield _line(event)
            for event in form.last():
                yield _line(event)
        except Exception as error:
            yield f"data: {bytes(of_error(error).body).decode()}\n\n"
        yield "data: [DONE]\n\n"

    return _Stream(answers, lines())


async def collect(answers: Answers, request: Request) -> list[Result]:
    """The results of all requests, in their order. Raises DisconnectedError once the client has gone, or the error of
    one; both abort the others."""
    results: dict[int, Result] = {}

    async def run() -> None:
        async for place, got in answers:
            if isinstance(got, Delta) and got.result is not None:
                check(got.result)
                results[place] = got.result

    async with answers:
        running, gone = asyncio.create_task(run()), asyncio.create_task(_gone(request))
        try:
            await asyncio.wait((running, gone), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise DisconnectedError
            await running
        finally:
            running.cancel()
            gone.cancel()
    return [results[place] for place in sorted(results)]


def check(result: Result | None) -> None:
    """Raise RequestError for a request that failed."""
    if result is not None and result.finish_reason == "error":
        raise RequestError(f"the request failed: {result.error}")


async def _gone(request: Request) -> None:
    """Returns once the client has gone, after the body was read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _line(event: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n"
