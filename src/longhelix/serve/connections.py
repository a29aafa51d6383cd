"""Limits on connections: their number, and how long a client may take to send a request or read a response."""

import asyncio
import fcntl
import resource
import sys
import termios
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

BACKLOG = 256  # connections that the kernel may accept before the server can refuse them
_RESERVE = BACKLOG + 256  # file descriptors that stay free for the backlog, for restarting ranks, and for files
_HEAD_S = 30.0  # time limit for receiving the request line and the headers
_READ_S = 60.0  # a client must read some of the unread bytes within this time
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


def most_connections() -> int:
    """Return the maximum number of connections. The server reserves at most half of the limit on open files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if limit == resource.RLIM_INFINITY else max(limit - _RESERVE, limit // 2)


class _Counted:
    """Transport that counts the bytes written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.written = 0

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(H11Protocol):
    """HTTP connection with time limits.

    The server closes a connection in three cases: too many connections are open, the headers of a request take too long
    to arrive, or the client does not read its response. In the last case the request is aborted. `Gate` limits the time
    for request bodies, and uvicorn limits the time between requests.
    """

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._read_bytes = 0  # bytes that the client had read when `_unread` started

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        self._counted = _Counted(transport)
        super().connection_made(self._counted)  # type: ignore[arg-type]  # it acts as a transport
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
            self._watch()  # the next response adds to the unread bytes

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
        """Start the timer for the headers of a request, unless it is running."""
        if self._timer is None:
            self._timer = self.loop.call_later(_HEAD_S, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self) -> None:
        """Restart the timer for unread bytes, if the client has not read all bytes."""
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
        """Return the number of bytes that the client's machine has acknowledged.

        These are the written bytes, minus the bytes in the transport's buffer and in the socket's buffer, which can
        contain megabytes.
        """
        held = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        waiting = self.transport.get_write_buffer_size() + int.from_bytes(held, sys.byteorder)
        return self._counted.written - waiting

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
