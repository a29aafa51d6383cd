"""The server as an ASGI application."""

import importlib.metadata
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.types import ASGIApp

from longhelix.serve import chat, completions, contexts, errors, live, page_files, responses, state
from longhelix.serve.calls import CallMiddleware
from longhelix.serve.gate import AccessControl, Gate
from longhelix.serve.serving import Serving


def build(serving: Serving, admission: AccessControl) -> ASGIApp:
    """Build the application. Its startup starts the engine, and its shutdown stops the engine."""

    @asynccontextmanager
    async def lifetime(app: FastAPI) -> AsyncIterator[None]:
        serving.driver.start()
        try:
            yield
        finally:
            await serving.driver.close()

    app = FastAPI(
        title="longhelix",
        version=importlib.metadata.version("longhelix"),
        lifespan=lifetime,
        docs_url=None,  # FastAPI's documentation pages load scripts from other sites
        redoc_url=None,
    )
    errors.install(app)
    for module in (completions, chat, responses, contexts, state, live):
        app.include_router(module.routes(serving))
    app.include_router(page_files.routes())
    app.add_middleware(Gate, admission=admission)
    _without_unused_status(app)
    return CallMiddleware(
        app=app, metrics=serving.metrics, log=serving.log, traces=serving.traces, paths=app.openapi()["paths"]
    )


def _without_unused_status(app: FastAPI) -> None:
    """Remove status 422 from the schema. FastAPI adds it for invalid requests, but `errors` answers them with 400."""
    for path in app.openapi()["paths"].values():
        for route in path.values():
            if "HTTPValidationError" in str(route["responses"].get("422")):
                del route["responses"]["422"]
