"""What every request passes first: its key, and the size of its body and how fast it comes."""

import asyncio
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longhelix.serve import page_files
from longhelix.serve.errors import refusal

_OPEN = frozenset({"/health", *page_files.PATHS})  # to whoever asks, as they are written and in no other way
_BODY_S, _BODY_BYTES_PER_S = 30.0, 8192  # for a body, and so much longer the more has come of it


@dataclass(frozen=True)
class Admission:
    """keys: one of them comes with each request, as `Authorization: Bearer KEY`; none: all may come."""

    keys: tuple[str, ...]
    most_body_bytes: int


class Gate:
    """Refuses requests without a key, and bodies that are too large or too slow, before anything else sees them."""

    def __init__(self, app: ASGIApp, admission: Admission) -> None:
        self._app = app
        self._keys = [key.encode() for key in admission.keys]
        self._most_bytes = admission.most_body_bytes
        self._too_large = f"the body is larger than {self._most_bytes} bytes: send less, or start with more allowed"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._keys and scope["path"] not in _OPEN and not self._admits(scope["headers"]):
            await refusal(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY")(
                scope, receive, send
            )
            return
        told = _content_length(scope["headers"])
        if told is not None and told > self._most_bytes:
            await refusal(413, self._too_large)(scope, receive, send)
            return
        clock = asyncio.get_running_loop().time
        begun_s, come, is_whole = clock(), 0, False

        async def bounded() -> Message:
            """What comes, which may be more than was told, and slower than anybody should have to wait for."""
            nonlocal come, is_whole
            if is_whole:
                return await receive()  # once the client has gone
            try:
                async with asyncio.timeout_at(begun_s + _BODY_S + come / _BODY_BYTES_PER_S):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(408, "the body comes too slowly: send it faster", {"Connection": "close"}) from error
            come += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if come > self._most_bytes:
                raise HTTPException(413, self._too_large)
            return message

        await self._app(scope, bounded, send)

    def _admits(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        # All keys are compared, in the same time whichever it is.
        found = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(found)


def _content_length(headers: Sequence[tuple[bytes, bytes]]) -> int | None:
    told = next((value for name, value in headers if name == b"content-length"), b"")
    return int(told) if told.isdigit() else None
