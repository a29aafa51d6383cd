"""Runs the server: listens on an address, reports the URL, and shuts down on a signal."""

import asyncio
import gc
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from longhelix.engine.workers import torchrun
from longhelix.errors import EngineError, UserError
from longhelix.serve.app import build
from longhelix.serve.connections import BACKLOG, Connection
from longhelix.serve.gate import AccessControl, is_loopback
from longhelix.serve.refusals import ShuttingDownError
from longhelix.serve.serving import Serving

_KEEP_ALIVE_S = 75  # maximum time between two requests of a connection
_POLL_S = 0.05  # interval between checks whether all requests have ended
_FLUSH_S = 5  # time limit for sending the last events of ended requests


@dataclass(frozen=True)
class Address:
    """Address to listen on, and time limit for the shutdown."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 selects any free port
    drain_s: float = 60.0  # how long running requests may continue during shutdown

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)

    def check(self, has_keys: bool, without_key: bool) -> None:
        """Raise UserError if the address is not loopback and neither `has_keys` nor `without_key` is set."""
        if has_keys or without_key or self.is_loopback:
            return
        raise UserError(
            f"other machines can reach the server at {self.host}: give --api-key-file, or --allow-without-key, or "
            "leave out --host"
        )


def run(serving: Serving, admission: AccessControl, address: Address, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, then refuse new requests and wait for running requests.

    Args:
        serving: the server.
        admission: rules for who may use the server.
        address: address to listen on.
        on_ready: called with the URL once the server accepts requests.

    Raises:
        UserError: the server cannot listen on the address.
    """
    listening = _listen(address)
    with listening:
        config = uvicorn.Config(
            build(serving, admission),
            loop="asyncio",  # not uvloop, which Ray Serve installs
            http=Connection,
            ws="none",
            backlog=BACKLOG,
            lifespan="on",
            log_config=None,  # `ServerLog` captures uvicorn's log messages
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_FLUSH_S,
        )
        host, port = listening.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        server = _Server(config, serving, address.drain_s, lambda: on_ready(f"http://{shown}:{port}"))
        gc.collect()
        gc.freeze()  # otherwise each full collection scans all these objects and blocks the event loop
        try:
            server.run(sockets=[listening])
        finally:
            gc.unfreeze()
        if server.has_failed:
            raise EngineError(serving.driver.failure)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, serving: Serving, drain_s: float, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._serving, self._drain_s, self._on_ready = serving, drain_s, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    @property
    def has_failed(self) -> bool:
        """Whether the engine has failed, and a launcher starts this process again. Otherwise the server stays up."""
        return torchrun.is_active() and bool(self._serving.driver.failure)

    async def on_tick(self, counter: int) -> bool:
        return self.has_failed or await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._serving.is_draining = True
        driver, deadline_s = self._serving.driver, time.monotonic() + self._drain_s
        running, waiting = driver.running, len(driver.waiting)
        words = f"draining: {running + waiting} requests have {self._drain_s:g} s to finish"
        self._serving.log.write("drain", words, running=running, waiting=waiting, drain_s=self._drain_s)
        while not (driver.is_idle or self.force_exit) and time.monotonic() < deadline_s:
            await asyncio.sleep(_POLL_S)
        driver.end_all(ShuttingDownError())
        await super().shutdown(sockets)
        if self.force_exit:  # uvicorn skips this after a second signal, but the driver must be closed
            await self.lifespan.shutdown()
        self._captured_signals.clear()  # otherwise uvicorn raises the signal again


def _listen(address: Address) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        # asyncio sets TCP_NODELAY only if the protocol is given. Without TCP_NODELAY, each small write waits until the
        # previous write is acknowledged, which takes 40 ms or more.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address.host, address.port))
        listening.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"the server cannot listen on {address.host} port {address.port} ({error}): choose another --host or --port"
        ) from error
    return listening
