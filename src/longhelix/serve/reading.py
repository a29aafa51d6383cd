"""How bodies are read, and for how long they are kept."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute


class BodyRoute(APIRoute):
    """Lets go of a request's body once its answer begins: that may take long, and images are large."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            # That which is given stays until the answer has ended: one of our own reads the body.
            return await handle(Request(request.scope, request.receive))

        return handler
