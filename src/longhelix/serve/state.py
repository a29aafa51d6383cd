"""Endpoints that describe the server and its model, and endpoints that convert between text and token ids."""

import importlib.metadata
import time

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from longhelix.serve import answers as forms
from longhelix.serve.bodies import DetokenizeBody, TokenizeBody
from longhelix.serve.errors import NO_TOOLS, ClientError, statuses
from longhelix.serve.json_pieces import json_pieces
from longhelix.serve.reading import BodyRoute
from longhelix.serve.serving import Serving
from longhelix.serve.streams import LongJson


def routes(serving: Serving) -> APIRouter:
    router = APIRouter(route_class=BodyRoute)
    tokenizer = serving.llm.tokenizer
    model = forms.Model(id=serving.model, created=serving.created_s, max_model_len=serving.max_model_len)

    @router.get("/v1/models", responses=statuses())
    async def models() -> forms.Models:
        """List the one model of this server."""
        return forms.Models(data=[model])

    @router.get("/v1/models/{name:path}", responses=statuses(404))
    async def one_model(name: str) -> forms.Model:
        """Describe the model, if it has this name."""
        serving.check_model(name)
        return model

    @router.get("/health", responses={503: {"model": forms.Health}})
    async def health(response: Response) -> forms.Health:
        """State of the engine; status 503 only after the engine has failed for good."""
        driver = serving.driver
        response.status_code = 503 if driver.failure else 200
        return forms.Health(
            status=serving.status,
            restarts=driver.restarts,
            steps=driver.steps,
            idle_s=round(time.monotonic() - driver.last_step_s, 3),
            running=driver.running,
            waiting=len(driver.waiting),
        )

    @router.get("/ready", responses={503: {"model": forms.Health}})
    async def ready(response: Response) -> forms.Health:
        """State of the engine; status 503 while the server does not accept requests."""
        found = await health(response)
        response.status_code = 200 if found.status == "ok" else 503
        return found

    @router.head("/metrics", responses=statuses(), response_class=Response)
    @router.get("/metrics", responses=statuses() | {200: {"content": {"text/plain": {}}}}, response_class=Response)
    async def metrics() -> Response:
        """Metrics in the Prometheus text format."""
        return Response(await serving.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version", responses=statuses())
    async def version() -> forms.Version:
        """Version of longhelix."""
        return forms.Version(version=importlib.metadata.version("longhelix"))

    @router.post("/tokenize", response_model=forms.TokenizeAnswer, responses=statuses(404, 429))
    async def tokenize(body: TokenizeBody) -> Response:
        """Convert text or messages to token ids."""
        serving.check_model(body.model)
        encode = tokenizer.encode if body.add_special_tokens else tokenizer.encode_more
        no_images = "/tokenize does not read images: the usage of an answer counts their tokens"
        if body.tools and tokenizer.tool_form is None:
            raise ClientError(NO_TOOLS, "tools")
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None
        ids = await serving.token_ids_alone(
            body, encode=encode, encode_messages=tokenizer.encode_chat, no_images=no_images, tools=tools
        )
        serving.reserve(len(ids) * ids.itemsize)
        found = {"tokens": ids, "count": len(ids), "max_model_len": serving.max_model_len}
        return LongJson(json_pieces(found), serving.long_answers.run)

    @router.post("/detokenize", response_model=forms.PromptText, responses=statuses(404, 429))
    async def detokenize(body: DetokenizeBody) -> Response:
        """Convert token ids to text."""
        serving.check_model(body.model)
        return LongJson(json_pieces({"prompt": await serving.text(body.tokens)}), serving.long_answers.run)

    return router
