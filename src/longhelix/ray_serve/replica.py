"""A replica: an engine with its HTTP application, in one of Ray's processes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from ray import serve
from starlette.types import Message

from longhelix.cli.replicas import ReplicaOptions
from longhelix.errors import EngineError
from longhelix.ray_serve.cores import take_cores
from longhelix.ray_serve.router import IS_READY
from longhelix.serve import app


@dataclass
class HttpRequest:
    """A request on its way to a replica, which empties the body when it has read it."""

    scope: dict[str, Any]
    body: bytes
    prompt: str  # Ray's router compares this field with the prompts that it has sent to each replica


@serve.deployment
class EngineReplica:
    """An engine and its HTTP application."""

    def __init__(self, options: ReplicaOptions) -> None:
        self._ends = contextlib.AsyncExitStack()
        if not options.num_gpus:
            for core in take_cores(options.num_cpus):
                self._ends.enter_context(core)
        log = self._ends.enter_context(contextlib.closing(options.server.log()))
        self._serving = self._ends.enter_context(options.server.start(options.model, options.engine, log))
        # Only the ingress, which has checked the API key, can reach a replica.
        self._admission = options.server.admission(self._serving, keys=(), is_loopback=False)
        self._app = app.build(self._serving, self._admission)
        self._serving.driver.start()
        self._ends.push_async_callback(self._serving.driver.close)

    async def answer(self, request: HttpRequest) -> AsyncIterator[Message]:
        """Yield the ASGI messages of the response."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        body = [{"type": "http.request", "body": request.body, "more_body": False}]
        request.body = b""  # Ray keeps the request until the response ends
        has_left = asyncio.Event()

        async def receive() -> Message:
            if body:
                return body.pop()
            await has_left.wait()
            return {"type": "http.disconnect"}

        task = asyncio.create_task(self._app(request.scope, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                yield message
        finally:
            has_left.set()
            await task

    async def most_body_bytes(self) -> int:
        """Return the maximum size of a request body."""
        return self._admission.most_body_bytes

    async def metrics(self) -> tuple[str, bytes]:
        """Return the name of this replica and its metrics."""
        return serve.get_replica_context().replica_tag, await self._serving.metrics.text()

    async def is_ready(self) -> bool:
        """True if this replica accepts requests."""
        return self._serving.status == "ok"

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return what the router reads."""
        return {IS_READY: await self.is_ready()}

    async def check_health(self) -> None:
        """Raise EngineError if the engine has failed for good. Ray then replaces this replica."""
        if self._serving.driver.failure:
            raise EngineError(self._serving.driver.failure)

    async def __del__(self) -> None:
        await self._ends.aclose()
