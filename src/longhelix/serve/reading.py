"""How bodies are read, and for how long they are kept."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Self

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Message

from longhelix.serve.errors import DisconnectedError
from longhelix.serve.gate import let_go_of_body
from longhelix.serve.streams import gone

# Levels. Schemas of guides have at most 64 of their own, and what is done with a body holds for 255.
DEEPEST = 100


class BodyRoute(APIRoute):
    """Refuses a body that is nested too deep, before anything is made of it, and lets go of it once its answer begins:
    that may take long, and images are large."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            # That which is given stays until the answer has ended: one of our own reads the body.
            try:
                return await handle(_Read(request.scope, request.receive))
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
    async def json(self) -> Any:
        """Raises HTTPException."""
        try:
            found = await super().json()
        except RecursionError:
            found = None
        else:
            if not _is_deeper(found, DEEPEST):
                return found
        raise HTTPException(400, f"the body is nested deeper than {DEEPEST} levels: make it flatter")


def _is_deeper(found: Any, levels: int) -> bool:
    level = [found] if isinstance(found, (dict, list)) else []
    for _ in range(levels):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
        level = [inner for inner in level if isinstance(inner, (dict, list))]
    return bool(level)
