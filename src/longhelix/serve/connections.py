"""Connections: how many there may be, and for how long each may keep the server waiting for what it sends or
reads."""

import asyncio
import fcntl
import resource
import sys
import termios
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

BACKLOG = 256  # that are taken in one go, before any of them can be refused
_RESERVE = BACKLOG + 256  # descriptors that are left for those, for ranks that start again, and for files
_HEAD_S = 30.0  # for the head of a request
_READ_S = 60.0  # in which a client has to read something of what waits for it
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def most_connections() -> int:
    """As the limit of open files is, half of which is the server's own where it is low."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if limit == resource.RLIM_INFINITY else max(limit - _RESERVE, limit // 2)


class _Counted:
    """A transport that counts what is written to it, in bytes."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.written = 0

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(H11Protocol):
    """Is closed where there are too many, and where a request has begun to come, but its head is not whole in time; the
    same of what comes once the answer has been sent. A client that reads nothing of what waits for it is cut off, which
    ends its request. `Gate` sees to bodies, and uvicorn to the time between two requests."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._read_bytes = 0  # when that timer began

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        self._counted = _Counted(transport)
        super().connection_made(self._counted)  # type: ignore[arg-type]  # it is one in all but its name
        if len(self.connections) > most_connections():
            transport.write(_FULL)
            transport.close()
            return
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE or self.conn.our_state is h11.DONE:
            self._wait()
        else:
            self._stop_waiting()
        if self._unread is not None:
            self._watch()  # what waits may grow by the next answer

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._forget_unread()
        super().connection_lost(exc)

    def _wait(self) -> None:
        """From now on, unless it has begun before."""
        if self._timer is None:
            self._timer = self.loop.call_later(_HEAD_S, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self) -> None:
        """From now on, as long as something waits that the socket does not take."""
        self._forget_unread()
        if self.transport.get_write_buffer_size():
            self._read_bytes = self._taken_bytes()
            self._unread = self.loop.call_later(_READ_S, self._cut_off_or_watch)

    def _cut_off_or_watch(self) -> None:
        if self._taken_bytes() > self._read_bytes:
            self._watch()
        else:
            self.transport.abort()

    def _taken_bytes(self) -> int:
        """By the client's machine: what was written, but for what waits here and in the socket, which holds
        megabytes."""
        held = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        waiting = self.transport.get_write_buffer_size() + int.from_bytes(held, sys.byteorder)
        return self._counted.written - waiting

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
