"""Routes that limit request bodies and release their memory before the response ends."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Self

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope

from longhelix.serve.errors import DisconnectedError, InvalidBodyError
from longhelix.serve.gate import release_body
from longhelix.serve.json_reader import LONG_TEXT, JsonBoundsError, read_json
from longhelix.serve.streams import disconnected
from longhelix.serve.work_queue import WorkQueue

_MOST_LONG_BODIES = 1024  # long bodies that may wait for the thread that parses them; `Gate` limits their bytes


class BodyRoute(APIRoute):
    """Route that refuses bodies that are nested too deep, and releases the body when the response begins.

    Bodies with images are large, and a response may take a long time.
    """

    reading: ClassVar[WorkQueue] = WorkQueue("long bodies", _MOST_LONG_BODIES)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        field = self.body_field
        form = None if field is None else TypeAdapter(field.field_info.annotation)

        async def handler(request: Request) -> Response:
            # FastAPI keeps `request` until the response has ended. Only the separate `_Read` object contains the
            # body, and it is released earlier.
            try:
                return await handle(_Read(request.scope, request.receive, form, self.reading))
            finally:
                release_body(request.scope)

        return handler


class AnswerRoute(BodyRoute):
    """Route that stops all work for a request if the client disconnects before the response begins."""

    # Called before the body is read. If the server accepts no requests, this function raises the error.

    check: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    @classmethod
    def after(cls, check: Callable[[], None]) -> type[Self]:
        """Return a route class that calls `check` first."""
        return type(cls.__name__, (cls,), {"check": staticmethod(check)})

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            self.check()
            body_has_come = asyncio.Event()

            async def receive() -> Message:
                message = await request.receive()
                if not message.get("more_body", False):
                    body_has_come.set()
                return message

            async def leave() -> None:
                await body_has_come.wait()
                await disconnected(request.receive)

            working = asyncio.create_task(handle(Request(request.scope, receive)))
            leaving = asyncio.create_task(leave())
            try:
                await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
                if not working.done():
                    raise DisconnectedError
                return await working
            finally:
                working.cancel()
                leaving.cancel()
                await asyncio.wait((working, leaving))  # the cancelled task must end before the request ends

        return handler


class _Read(Request):
    """Request with a JSON body. A thread parses and validates long bodies, so that streams are not interrupted."""

    def __init__(self, scope: Scope, receive: Receive, form: TypeAdapter[Any] | None, reading: WorkQueue) -> None:
        super().__init__(scope, receive)
        self._form, self._reading = form, reading

    async def json(self) -> Any:
        """Return the parsed body: plain JSON values for a short body, or the validated object for a long body.

        Raises:
            HTTPException: the body cannot be read.
        """
        encoding = self.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise HTTPException(400, f"the body has content-encoding {encoding[:40]}: send it uncompressed")
        body = await self.body()
        if len(body) > LONG_TEXT and self._form is not None:
            return await self._reading.run(_checked, self._form, body)
        return _read(body)


def _checked(form: TypeAdapter[Any], body: bytes) -> Any:
    """Parse and validate a body. Raises InvalidBodyError or HTTPException."""
    found = _read(body)
    try:
        return form.validate_python(found)
    except ValidationError as error:
        raise InvalidBodyError(error, found) from error


def _read(body: bytes) -> Any:
    """Parse a body. Raises HTTPException."""
    try:
        return read_json(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise HTTPException(400, f"the body is not UTF-8 at byte {error.start}: send JSON in UTF-8") from error
    except JsonBoundsError as error:
        raise HTTPException(400, f"the body {error}") from error
