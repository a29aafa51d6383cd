"""The server as an ASGI application."""

import importlib.metadata
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.types import ASGIApp

from longhelix.serve import chat, completions, contexts, errors, live, page_files, responses, state
from longhelix.serve.calls import Calls
from longhelix.serve.gate import AccessControl, Gate
from longhelix.serve.serving import Serving


def build(serving: Serving, admission: AccessControl) -> ASGIApp:
    """Its lifetime is that of the engine, which ends with it."""

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
        docs_url=None,  # these pages would run scripts from elsewhere
        redoc_url=None,
    )
    errors.install(app)
    for room in (completions, chat, responses, contexts, state, live):
        app.include_router(room.routes(serving))
    app.include_router(page_files.routes())
    app.add_middleware(Gate, admission=admission)
    _without_unused_status(app)
    return Calls(app, serving.metrics, serving.journal, serving.traces, app.openapi()["paths"])


def _without_unused_status(app: FastAPI) -> None:
    """FastAPI documents 422 for what is wrong with a request, which `errors` makes 400 of."""
    for path in app.openapi()["paths"].values():
        for route in path.values():
            if "HTTPValidationError" in str(route["responses"].get("422")):
                del route["responses"]["422"]
