"""An application for Ray Serve: replicas of longhelix, and Ray's router in front of them. Needs longhelix[ray].

`serve run longhelix.ray_serve:build model=builtin device=cpu num_replicas=2` starts it.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from ray import serve
from ray.exceptions import RayActorError
from ray.serve import Application
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longhelix.cli.replicas import ReplicaOptions, replica_options
from longhelix.errors import EngineError, UserError
from longhelix.serve import app, errors
from longhelix.serve.gate import AccessControl, Gate
from longhelix.serve.merged_metrics import merged_metrics
from longhelix.serve.prompt_text import prompt_text
from longhelix.serve.refusals import RestartingError

# The public name is ray.serve.llm.request_router.PrefixCacheAffinityRouter, but that module needs vLLM.
_ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
_ROUTING = {
    # By default, the router ignores the load, and its prefixes grow without limit.
    "imbalanced_threshold": 8,
    "do_eviction": True,
    "eviction_threshold_chars": 64_000_000,
    "eviction_target_chars": 56_000_000,
}
_NO_LIMIT = 1_000_000  # requests; the replicas refuse requests when too many wait
# What a replica reads of an ASGI scope. The other entries belong to the process that received the request.
_SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path"),
    *("headers", "client", "server"),
)


def build(arguments: dict[str, Any]) -> Application:
    """Return the application.

    Args:
        arguments: `num_replicas`, `threads_per_rank`, and options of `longhelix serve` by name.

    Raises:
        UserError: a name is unknown, or a value is invalid.
    """
    options = replica_options(arguments)
    replicas = EngineReplica.options(
        num_replicas=options.num_replicas,
        max_ongoing_requests=options.max_running + options.server.max_waiting_requests,
        graceful_shutdown_timeout_s=options.server.drain,
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER, request_router_kwargs=_ROUTING),
    )
    return Ingress.bind(replicas.bind(options), options)


@dataclass(frozen=True)
class HttpRequest:
    """A request on its way to a replica."""

    scope: dict[str, Any]
    body: bytes
    prompt: str  # Ray's router compares this field with the prompts that it has sent to each replica


@serve.deployment
class EngineReplica:
    """An engine and its HTTP application."""

    def __init__(self, options: ReplicaOptions) -> None:
        keys = _keys(options)
        self._ends = contextlib.AsyncExitStack()
        if not options.num_gpus:
            for core in _take_cores(options.num_cpus):
                self._ends.enter_context(core)
        log = self._ends.enter_context(contextlib.closing(options.server.log()))
        self._serving = self._ends.enter_context(options.server.start(options.model, options.engine, log))
        self._admission = options.server.admission(self._serving, keys, is_loopback=False)
        self._app = app.build(self._serving, self._admission)
        self._serving.driver.start()
        self._ends.push_async_callback(self._serving.driver.close)

    async def answer(self, request: HttpRequest) -> AsyncIterator[Message]:
        """Yield the ASGI messages of the response."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        body = [{"type": "http.request", "body": request.body, "more_body": False}]
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

    async def check_health(self) -> None:
        """Raise EngineError if the engine has failed for good. Ray then replaces this replica."""
        if self._serving.driver.failure:
            raise EngineError(self._serving.driver.failure)

    async def __del__(self) -> None:
        await self._ends.aclose()


@serve.deployment(max_ongoing_requests=_NO_LIMIT, ray_actor_options={"num_cpus": 0})
@serve.ingress()
class Ingress:
    """Receives HTTP requests, and sends each one to the replica that Ray's router chooses."""

    def __init__(self, replicas: DeploymentHandle, options: ReplicaOptions) -> None:
        self._replicas, self._keys = replicas, _keys(options)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        most_bytes = await self._replicas.most_body_bytes.remote()
        found = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        errors.install(found)
        found.add_exception_handler(RayActorError, _restarting)
        found.add_middleware(Gate, admission=AccessControl(self._keys, most_bytes))
        found.add_route("/metrics", self._metrics)
        found.mount("/", self._forward)
        return found

    async def _metrics(self, request: Request) -> Response:
        # No timeout: Ray would drop the answers of all replicas because of a slow one.
        answers = self._replicas.broadcast("metrics").results_async(return_exceptions=True)
        # A replica that ends has no metrics.
        found = dict(each for each in await answers if not isinstance(each, BaseException))
        return Response(merged_metrics(found, "replica"), media_type=CONTENT_TYPE_LATEST)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        parts = {name: scope[name] for name in _SCOPE if name in scope}
        request = HttpRequest(parts, body, await asyncio.to_thread(prompt_text, body))
        answer = self._replicas.options(stream=True).answer
        # The router reads positional arguments, and fails if it finds no prompt in them.
        messages = answer.remote(request) if request.prompt else answer.remote(request=request)
        try:
            async for message in messages:
                if message["type"] == "http.response.start":
                    # Ray's proxy adds a request id of its own.
                    headers = [each for each in message["headers"] if each[0] != b"x-request-id"]
                    message = message | {"headers": headers}
                await send(message)
        except BaseException:
            messages.cancel()
            raise


async def _restarting(request: Request, error: Exception) -> Response:
    return errors.response_for(RestartingError())


def _keys(options: ReplicaOptions) -> tuple[str, ...]:
    """Return the API keys. Raises UserError if there are none and the options do not allow that."""
    keys = options.server.keys()
    if not keys and not options.allow_without_key:
        raise UserError(
            "other machines may reach the HTTP proxies of Ray Serve: set api_key_file, the environment variable "
            "LONGHELIX_API_KEY, or allow_without_key"
        )
    return keys


def _take_cores(number: int) -> list[socket.socket]:
    """Run this thread, and the processes that it starts, on cores that no other replica on this machine uses.

    Returns:
        Sockets that are bound to the names of the cores. A core is free again when its socket is closed, also if this
        process is killed.

    Raises:
        UserError: too few cores are free.
    """
    taken: dict[int, socket.socket] = {}
    for core in sorted(os.sched_getaffinity(0)):
        if len(taken) == number:
            break
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0longhelix core {core}")
        except OSError:
            name.close()
        else:
            taken[core] = name
    if len(taken) < number:
        raise UserError(
            f"a replica needs {number} cores, but only {len(taken)} cores of this machine are free: start Ray with at "
            "most as many CPUs as the machine has cores, or set a smaller threads_per_rank"
        )
    os.sched_setaffinity(0, taken)
    return list(taken.values())
