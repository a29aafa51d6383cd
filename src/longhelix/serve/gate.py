"""What every request passes first: its key, the size of its body and how fast it comes, and what others have sent."""

import asyncio
import hmac
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longhelix.serve import page_files
from longhelix.serve.errors import refusal

_OPEN = frozenset({"/health", *page_files.PATHS})  # to whoever asks, as they are written and in no other way
_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::[0-9]*)?")
_BODY_S, _BODY_BYTES_PER_S = 30.0, 8192  # for a body, and so much longer the more has come of it
_MOST_BODIES = 16  # of the largest size, here at the same time: what is made of one takes several times as much
_LET_GO = "longhelix.let_go_of_body"  # in a request's scope
_FULL = "so much of other requests is being read that no more is taken now: try again later"


Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True)
class AccessControl:
    """keys: one of them comes with each request, as `Authorization: Bearer KEY`; none: all may come. is_loopback: the
    server can be reached from this machine alone. Without keys only its own programs may come then, and no page of
    another site in a browser here, be it under a name that leads here (DNS rebinding)."""

    keys: tuple[str, ...]
    most_body_bytes: int
    is_loopback: bool = False


class Gate:
    """Refuses requests without a key or from pages of other sites, and bodies that are too large, too slow or too many,
    before anything else sees them."""

    def __init__(self, app: ASGIApp, admission: AccessControl) -> None:
        self._app = app
        self._keys = [key.encode() for key in admission.keys]
        self._only_here = admission.is_loopback and not admission.keys
        self._most_bytes = admission.most_body_bytes
        self._held_bytes = 0  # of bodies that are here
        self._too_large = f"the body is larger than {self._most_bytes} bytes: send less, or start with more allowed"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] not in _OPEN:
            refused = self._refused(scope["headers"])
            if refused is not None:
                await refused(scope, receive, send)
                return
        told = _content_length(scope["headers"])
        if told is not None and told > self._most_bytes:
            await refusal(413, self._too_large)(scope, receive, send)
            return
        if not self._has_room(told or 0):
            await refusal(429, _FULL)(scope, receive, send)
            return
        clock = asyncio.get_running_loop().time
        begun_s, come, is_whole = clock(), 0, False
        held, is_kept = 0, True

        async def bounded() -> Message:
            """What comes, which may be more than was told, and slower than anybody should have to wait for."""
            nonlocal come, is_whole, held
            if is_whole:
                return await receive()  # once the client has gone
            try:
                async with asyncio.timeout_at(begun_s + _BODY_S + come / _BODY_BYTES_PER_S):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(
                    408, "the body comes too slowly: send it faster", {"Connection": "close"}
                ) from error
            more = len(message.get("body", b""))
            come += more
            is_whole = not message.get("more_body", False)
            if come > self._most_bytes:
                raise HTTPException(413, self._too_large)
            if is_kept:
                if not self._has_room(more):
                    raise HTTPException(429, _FULL)
                held += more
                self._held_bytes += more
            return message

        def let_go() -> None:
            nonlocal held, is_kept
            self._held_bytes -= held
            held, is_kept = 0, False

        scope[_LET_GO] = let_go
        try:
            await self._app(scope, bounded, send)
        finally:
            let_go()

    def _has_room(self, more_bytes: int) -> bool:
        return self._held_bytes + more_bytes <= _MOST_BODIES * self._most_bytes

    def _refused(self, headers: Headers) -> JSONResponse | None:
        """What whoever sends such headers is told; None for those that may come."""
        if self._keys and not self._admits(headers):
            return refusal(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY")
        if self._only_here and not _names_loopback(_header(headers, b"host").decode("latin-1")):
            return refusal(
                403, "the server is for this machine alone: ask 127.0.0.1 or localhost, or start it with API keys"
            )
        if self._only_here and _header(headers, b"sec-fetch-site") == b"cross-site":
            return refusal(403, "pages of other sites may not ask this server: start it with API keys")
        return None

    def _admits(self, headers: Headers) -> bool:
        given = _header(headers, b"authorization")
        scheme, _, key = given.partition(b" ")
        # All keys are compared, in the same time whichever it is.
        found = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(found)


def let_go_of_body(scope: Scope) -> None:
    """Say that nothing of a request's body is kept any more, though its answer may take long."""
    scope.get(_LET_GO, lambda: None)()


def is_loopback(host: str) -> bool:
    """Whether an address or a name is this machine's alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _names_loopback(host: str) -> bool:
    """Of the header that says whom a client asks."""
    found = _HOST.fullmatch(host)
    return found is not None and is_loopback(found[1].strip("[]"))


def _header(headers: Headers, name: bytes) -> bytes:
    return next((value for each, value in headers if each == name), b"")


def _content_length(headers: Headers) -> int | None:
    told = _header(headers, b"content-length")
    return int(told) if told.isdigit() else None
