"""What a method that a path does not have is told."""

import asyncio

import httpx
import pytest
from fastapi import APIRouter, FastAPI

from longhelix.serve.errors import install

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("path", "allowed"), [("/things", "GET, POST"), ("/things/one", "DELETE, GET")])
def test_all_methods_of_a_path_are_named(path, allowed):
    """As RFC 9110 has it (15.5.6), and not those of the first route alone."""
    router = APIRouter()
    for method, of in (
        ("POST", "/things"),
        ("GET", "/things"),
        ("GET", "/things/{name}"),
        ("DELETE", "/things/{name}"),
    ):
        router.add_api_route(of, lambda: None, methods=[method])
    app = FastAPI()
    app.include_router(router)
    install(app)

    async def ask():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            return await client.put(path)

    answer = asyncio.run(ask())
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
