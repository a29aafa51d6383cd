"""Who may ask a server on loopback that has no keys: programs of this machine, and no page of another site; and how
much may be here of all bodies together."""

import asyncio

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request, Response

from longhelix.serve.errors import install
from longhelix.serve.gate import AccessControl, Gate
from longhelix.serve.reading import BodyRoute
from longhelix.serve.server import Address
from longhelix.serve.streams import disconnected

pytestmark = pytest.mark.unit


async def application(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"served"})


def ask(admission, path="/v1/models", **headers):
    async def asked():
        transport = httpx.ASGITransport(Gate(application, admission))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return await client.get(path, headers=named)

    return asyncio.run(asked())


HERE = AccessControl((), 1000, is_loopback=True)
HOSTS = ["127.0.0.1", "127.0.0.1:8000", "localhost", "LocalHost:80", "[::1]", "[::1]:8000", "127.0.0.2:1"]
OTHERS = [
    *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "localhost:80:80"),
    *(
        "",
        ":8000",
        "10.0.0.1",
        "[::2]:8000",
        "::1",
        "127.0.0.1@evil.example",
        "127.0.0.1:evil",
        "[localhost",
        "0.0.0.0",
    ),
]


@pytest.mark.parametrize("host", HOSTS)
def test_names_of_this_machine_are_served(host):
    assert ask(HERE, host=host).text == "served"


@pytest.mark.parametrize("host", OTHERS)
def test_other_names_are_not(host):
    answer = ask(HERE, host=host)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_from_here")
    assert "localhost" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("site", "status"), [("cross-site", 403), ("same-site", 200), ("same-origin", 200), ("none", 200)]
)
def test_pages_of_other_sites_are_not(site, status):
    assert ask(HERE, sec_fetch_site=site).status_code == status


def test_what_is_open_to_all_stays_so():
    """A link on another site leads to the page, which then asks for itself."""
    for path in ("/", "/health", "/ready"):
        assert ask(HERE, path, host="evil.example", sec_fetch_site="cross-site").text == "served"


@pytest.mark.parametrize(
    "admission", [AccessControl((), 1000), AccessControl(("k",), 1000), AccessControl(("k",), 1000, True)]
)
def test_servers_with_keys_or_for_others_are_asked_by_any_name(admission):
    found = ask(admission, host="here.example", sec_fetch_site="cross-site", authorization="Bearer k")
    assert found.text == "served"


@pytest.mark.parametrize(
    ("host", "found"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False)]
)
def test_which_addresses_are_loopback(host, found):
    assert Address(host).is_loopback is found


class Late(Response):
    """Begins long after it was made, and takes what of the body nobody has read."""

    def __init__(self, may_begin):
        super().__init__()
        self.may_begin = may_begin

    async def __call__(self, scope, receive, send):
        leaving = asyncio.create_task(disconnected(receive))
        await self.may_begin.wait()
        leaving.cancel()
        await application(scope, receive, send)


class Reader:
    """Reads bodies, 1000 bytes each at most and so 16,000 together; answers once it may; what it answers begins once
    that may."""

    def __init__(self):
        self.read, self.may_answer, self.may_begin = asyncio.Semaphore(0), asyncio.Event(), asyncio.Event()
        self.answered = asyncio.Semaphore(0)
        router, app = APIRouter(route_class=BodyRoute), FastAPI()

        async def read(request: Request):
            if "x-unread" not in request.headers:
                await request.body()
            self.read.release()
            await self.may_answer.wait()
            self.answered.release()
            return Late(self.may_begin)

        router.add_api_route("/read", read, methods=["POST"], response_model=None)
        app.include_router(router)
        install(app)
        self.app = Gate(app, AccessControl((), 1000))

    async def ask(self, content, **headers):
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            return await client.post("/read", content=content, headers=headers)


async def pieces(count):
    """A body that does not say how long it is."""
    for _ in range(count):
        yield b"x" * 100


def test_all_bodies_together_are_bounded_while_they_are_here():
    async def test():
        reader = Reader()
        asking = [asyncio.create_task(reader.ask(b"x" * 1000)) for _ in range(15)]
        asking.append(asyncio.create_task(reader.ask(pieces(9))))
        for _ in asking:
            await reader.read.acquire()
        for more in (b"x" * 101, b"x" * 1000, pieces(2), pieces(10)):
            answer = await reader.ask(more)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"]["code"] == "overloaded"
        assert reader.read.locked(), "what is refused is not read to its end"
        asking.append(asyncio.create_task(reader.ask(b"x" * 100)))
        await reader.read.acquire()
        assert (await reader.ask(b"x")).status_code == 429
        reader.may_answer.set()
        reader.may_begin.set()
        assert [answer.text for answer in await asyncio.gather(*asking)] == ["served"] * 17
        assert (await reader.ask(pieces(10))).text == "served"

    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize("headers", [{}, {"x-unread": "1"}], ids=["read", "unread"])
def test_a_body_does_not_count_while_its_answer_is_waited_for(headers):
    """Nor does what comes of it only then, which nobody keeps."""

    async def test():
        reader, asking = Reader(), []
        reader.may_answer.set()
        for _ in range(40):
            asking.append(asyncio.create_task(reader.ask(pieces(10), **headers)))
            await reader.answered.acquire()
            for _ in range(20):
                await asyncio.sleep(0)
        asking.append(asyncio.create_task(reader.ask(b"x" * 1000)))
        await reader.read.acquire()
        reader.may_begin.set()
        assert [answer.text for answer in await asyncio.gather(*asking)] == ["served"] * 41

    asyncio.run(asyncio.wait_for(test(), 60))
