"""Middleware that first checks every request: API key, origin, and the size and speed of its body."""

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

_OPEN = frozenset({"/health", "/ready", *page_files.PATHS})  # paths that need no key; they must match exactly
_HOST = re.compile(r"(\[[^\[\]]*\]|[^:\[\]]*)(?::[0-9]*)?")
_BODY_S, _BODY_BYTES_PER_S = 30.0, 8192  # base time limit for a body, extended by 1 s per 8192 received bytes
_MOST_BODIES = 16  # bodies of maximum size in memory at a time, because parsing a body takes several times its size
_RELEASE = "longhelix.release_body"  # key in the scope of a request
_FULL = "the server is already reading too many request bodies: try again later"


Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True)
class AccessControl:
    """Rules for who may use the server and how much they may send."""

    keys: tuple[str, ...]  # valid API keys, sent as `Authorization: Bearer KEY`; empty if no key is needed
    most_body_bytes: int  # maximum size of one request's body
    # True if the server listens on a loopback address. If it also has no keys, it refuses cross-site requests, even
    # from a site with a host name that resolves to this machine (DNS rebinding).
    is_loopback: bool = False


class Gate:
    """Middleware that refuses requests without a valid key, or cross-site requests if a local server has no keys.

    It also refuses bodies that are too large or arrive too slowly, and new bodies while too many are in memory.
    """

    def __init__(self, app: ASGIApp, admission: AccessControl) -> None:
        self._app = app
        self._keys = [key.encode() for key in admission.keys]
        self._only_here = admission.is_loopback and not admission.keys
        self._most_bytes = admission.most_body_bytes
        self._held_bytes = 0  # total size of all bodies in memory
        self._too_large = (
            f"the body is larger than {self._most_bytes} bytes: send less, or start the server with a larger "
            "--max-body-bytes"
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"] not in _OPEN:
            refused = self._refused(scope["headers"])
            if refused is not None:
                await refused(scope, receive, send)
                return
        length = _content_length(scope["headers"])
        if length is not None and length > self._most_bytes:
            await refusal(413, self._too_large)(scope, receive, send)
            return
        if not self._has_room(length or 0):
            await refusal(429, _FULL)(scope, receive, send)
            return
        clock = asyncio.get_running_loop().time
        begun_s, received, is_whole = clock(), 0, False
        held, is_kept = 0, True

        async def bounded() -> Message:
            """Receive the next message and check the body's size and speed. Content-Length may be missing or wrong."""
            nonlocal received, is_whole, held
            if is_whole:
                return await receive()  # the next message is the disconnect
            try:
                async with asyncio.timeout_at(begun_s + _BODY_S + received / _BODY_BYTES_PER_S):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(
                    408, "the body arrives too slowly: send it faster", {"Connection": "close"}
                ) from error
            more = len(message.get("body", b""))
            received += more
            is_whole = not message.get("more_body", False)
            if received > self._most_bytes:
                raise HTTPException(413, self._too_large)
            if is_kept:
                if not self._has_room(more):
                    raise HTTPException(429, _FULL)
                held += more
                self._held_bytes += more
            return message

        def release() -> None:
            nonlocal held, is_kept
            self._held_bytes -= held
            held, is_kept = 0, False

        scope[_RELEASE] = release
        try:
            await self._app(scope, bounded, send)
        finally:
            release()

    def _has_room(self, more_bytes: int) -> bool:
        return self._held_bytes + more_bytes <= _MOST_BODIES * self._most_bytes

    def _refused(self, headers: Headers) -> JSONResponse | None:
        """Return the response that refuses a request with these headers, or None if it is allowed."""
        if self._keys and not self._admits(headers):
            return refusal(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY")
        if self._only_here and not _names_loopback(_header(headers, b"host").decode("latin-1")):
            return refusal(
                403,
                "the server only accepts requests to 127.0.0.1 or localhost: use one of these hosts, or start it "
                "with API keys",
            )
        if self._only_here and _header(headers, b"sec-fetch-site") == b"cross-site":
            return refusal(403, "cross-site requests are not allowed without API keys: start the server with API keys")
        return None

    def _admits(self, headers: Headers) -> bool:
        given = _header(headers, b"authorization")
        scheme, _, key = given.partition(b" ")
        # Compare all keys in constant time, so that timing does not reveal any of them.
        found = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        return scheme.lower() == b"bearer" and any(found)


def release_body(scope: Scope) -> None:
    """Stop counting a request's body: it is no longer in memory, even if the response has not ended yet."""
    scope.get(_RELEASE, lambda: None)()


def is_loopback(host: str) -> bool:
    """True if an address or a host name is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _names_loopback(host: str) -> bool:
    """True if a Host header names a loopback address."""
    found = _HOST.fullmatch(host)
    return found is not None and is_loopback(found[1].strip("[]"))


def _header(headers: Headers, name: bytes) -> bytes:
    return next((value for each, value in headers if each == name), b"")


def _content_length(headers: Headers) -> int | None:
    length = _header(headers, b"content-length")
    return int(length) if length.isdigit() else None
