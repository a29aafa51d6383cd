"""Clients that go away before their answers begin."""

import asyncio

import pytest
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel

from longhelix.serve.errors import install
from longhelix.serve.reading import AnswerRoute

pytestmark = pytest.mark.unit


class Body(BaseModel):
    prompt: str


def ask(wait, *, leaves):
    """The statuses of a request whose handler awaits `wait`, and whether that was called off."""
    router, ends, sent = APIRouter(route_class=AnswerRoute), [], []

    @router.post("/answer")
    async def answer(body: Body) -> str:
        try:
            await wait()
        except asyncio.CancelledError:
            ends.append("called off")
            raise
        return body.prompt

    app = FastAPI()
    app.include_router(router)
    install(app)
    come = [
        {"type": "http.request", "body": b'{"prompt": ', "more_body": True},
        {"type": "http.request", "body": b'"hello"}', "more_body": False},
    ]

    async def receive():
        if come:
            return come.pop(0)
        if not leaves:
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/answer",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 20))
    return [message["status"] for message in sent if "status" in message], ends


def test_what_is_done_for_a_client_that_has_gone_is_called_off():
    assert ask(asyncio.Event().wait, leaves=True) == ([499], ["called off"])


def test_a_client_that_stays_is_answered():
    assert ask(lambda: asyncio.sleep(0.05), leaves=False) == ([200], [])
