"""The HTTP entrance of the application: it checks each request and sends it to a replica."""

import asyncio
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from longhelix.cli.replicas import ReplicaOptions
from longhelix.errors import UserError
from longhelix.ray_serve.replica import HttpRequest
from longhelix.serve import errors
from longhelix.serve.gate import AccessControl, Gate, release_body
from longhelix.serve.merged_metrics import merged_metrics
from longhelix.serve.refusals import NoReplicaError, RestartingError
from longhelix.serve.routing_text import routing_text

# What a replica reads of an ASGI scope. The other entries belong to the process that received the request.
_SCOPE = (
    *("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path"),
    *("headers", "client", "server"),
)
_ANSWER_S = 5.0  # for questions to all replicas; Prometheus waits 10 s for metrics
_REQUEST_ID, _REPLICA_REQUEST_ID = b"x-request-id", b"x-replica-request-id"


@serve.deployment(ray_actor_options={"num_cpus": 0})
@serve.ingress()
class Ingress:
    """Receives HTTP requests, and sends each one to the replica that Ray's router chooses."""

    def __init__(self, replicas: DeploymentHandle, options: ReplicaOptions) -> None:
        self._replicas, self._keys = replicas, _keys(options)

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        most_bytes = await self._most_body_bytes()
        found = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)
        errors.install(found)
        for kind in (RayActorError, DeploymentUnavailableError):
            found.add_exception_handler(kind, _restarting)
        found.add_middleware(Gate, admission=AccessControl(self._keys, most_bytes))
        found.add_route("/health", _health)
        found.add_route("/ready", self._ready)
        found.add_route("/metrics", self._metrics)
        found.mount("/", self._forward)
        return found

    async def _most_body_bytes(self) -> int:
        while True:
            try:
                return await self._replicas.most_body_bytes.remote()
            except (NoReplicaError, RayActorError):
                pass  # the first replica may need a long time to load the model

    async def _ready(self, request: Request) -> Response:
        ready = await self._ask_all("is_ready")
        found = {"status": "ok" if any(ready) else "restarting", "replicas": len(ready), "ready": sum(ready)}
        return JSONResponse(found, 200 if any(ready) else 503)

    async def _metrics(self, request: Request) -> Response:
        found = dict(await self._ask_all("metrics"))
        return Response(await asyncio.to_thread(merged_metrics, found, "replica"), media_type=CONTENT_TYPE_LATEST)

    async def _ask_all(self, method: str) -> list[Any]:
        """Return what a method of the replicas returns, without the replicas that end or do not answer in time."""
        # The public method of a broadcast drops the answers of all replicas because of a slow one.
        asked = self._replicas.broadcast(method)._fetch_replica_results_async()
        try:
            results = await asyncio.wait_for(asked, _ANSWER_S)
        except TimeoutError:
            return []
        answers = [asyncio.wait_for(each.get_async(), _ANSWER_S) for each in results]
        found = await asyncio.gather(*answers, return_exceptions=True)
        return [each for each in found if not isinstance(each, BaseException)]

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await WebSocketClose()(scope, receive, send)
            return
        try:
            body = await Request(scope, receive).body()
        except ClientDisconnect:
            return
        parts = {name: scope[name] for name in _SCOPE if name in scope}
        request = HttpRequest(parts, body, await asyncio.to_thread(routing_text, scope["method"], scope["path"], body))
        answer = self._replicas.options(stream=True).answer
        # The router reads positional arguments, and fails if it finds no prompt in them.
        messages = answer.remote(request) if request.prompt else answer.remote(request=request)
        del request, body
        try:
            async for message in messages:
                if message["type"] == "http.response.start":
                    release_body(scope)
                    message = message | {"headers": [_renamed(*each) for each in message["headers"]]}
                await send(message)
        except BaseException:
            messages.cancel()
            raise


def _renamed(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """Return a header of a replica. Ray's proxy adds a request id of its own."""
    return (_REPLICA_REQUEST_ID if name == _REQUEST_ID else name), value


async def _health(request: Request) -> Response:
    return JSONResponse({"status": "ok"})  # Ray replaces replicas that fail


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
