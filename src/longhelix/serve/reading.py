"""How bodies are read, and for how long they are kept."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Self

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope

from longhelix.serve.errors import DisconnectedError, InvalidBodyError
from longhelix.serve.gate import let_go_of_body
from longhelix.serve.json_reader import LONG_TEXT, JsonBoundsError, read_json
from longhelix.serve.line import Line
from longhelix.serve.streams import gone

_MOST_LONG_BODIES = 1024  # that wait for the thread that reads them; `Gate` bounds their bytes


class BodyRoute(APIRoute):
    """Refuses a body that is nested too deep, before anything is made of it, and lets go of it once its answer begins:
    that may take long, and images are large."""

    reading: ClassVar[Line] = Line("long bodies", _MOST_LONG_BODIES)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        field = self.body_field
        form = None if field is None else TypeAdapter(field.field_info.annotation)

        async def handler(request: Request) -> Response:
            # That which is given stays until the answer has ended: one of our own reads the body.
            try:
                return await handle(_Read(request.scope, request.receive, form, self.reading))
            finally:
                let_go_of_body(request.scope)

        return handler


class AnswerRoute(BodyRoute):
    """Answers that are waited for: a client that goes away before one begins has nothing more done for it, such as a
    guide compiled.

    check: raises what all are told while none is taken, before anything of a body is read.
    """

    check: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    @classmethod
    def after(cls, check: Callable[[], None]) -> type[Self]:
        """The same, with a check of its own."""
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
                await gone(request.receive)

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
                await asyncio.wait((working, leaving))  # what is called off is told before the request's end is

        return handler


class _Read(Request):
    """Reads JSON. What is long is read, and checked, on a thread of its own: streams of others go on meanwhile."""

    def __init__(self, scope: Scope, receive: Receive, form: TypeAdapter[Any] | None, reading: Line) -> None:
        super().__init__(scope, receive)
        self._form, self._reading = form, reading

    async def json(self) -> Any:
        """Returns JSON, or the route's own object where the text is long. Raises HTTPException."""
        encoding = self.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise HTTPException(400, f"the body has content-encoding {encoding[:40]}: send it uncompressed")
        body = await self.body()
        if len(body) > LONG_TEXT and self._form is not None:
            return await self._reading.run(_checked, self._form, body)
        return _read(body)


def _checked(form: TypeAdapter[Any], body: bytes) -> Any:
    """Raises InvalidBodyError, HTTPException."""
    found = _read(body)
    try:
        return form.validate_python(found)
    except ValidationError as error:
        raise InvalidBodyError(error, found) from error


def _read(body: bytes) -> Any:
    """Raises HTTPException."""
    try:
        return read_json(body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise HTTPException(400, f"the body is not UTF-8 at byte {error.start}: send JSON in UTF-8") from error
    except JsonBoundsError as error:
        raise HTTPException(400, f"the body {error}") from error
