"""Connections that send nothing, or little by little, and more of them than there may be: over sockets."""

import asyncio
import contextlib
import json
import socket

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from longhelix.serve import connections, errors, gate
from longhelix.serve.gate import AccessControl, Gate

pytestmark = pytest.mark.dist

SOON_S, LATE_S = 0.3, 5.0  # what is waited for, and what no test takes
MUCH = 400  # pieces: more than buffers of sockets hold
HEAD = b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: 20\r\n"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(connections, "_HEAD_S", SOON_S)
    monkeypatch.setattr(connections, "_READ_S", SOON_S)
    monkeypatch.setattr(gate, "_BODY_S", SOON_S)


def application():
    app = FastAPI()
    errors.install(app)

    @app.post("/")
    async def size(request: Request) -> int:
        return len(await request.body())

    @app.post("/deaf")
    async def deaf() -> str:
        return "nothing is read"

    @app.get("/whole")
    async def whole() -> Response:
        return Response(b"x" * (65_536 * MUCH))

    @app.get("/much")
    async def much() -> StreamingResponse:
        return StreamingResponse(b"x" * 65_536 for _ in range(MUCH))

    app.add_middleware(Gate, admission=AccessControl((), 10_000))
    return app


def run(test):
    """A test beside a server, on the event loop that servers have, which opens connections to it."""
    config = uvicorn.Config(
        application(), loop="asyncio", http=connections.Connection, ws="none", lifespan="off", log_config=None
    )

    async def whole():
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve(sockets=[listening]))
            while not server.started:
                await asyncio.sleep(0.01)

            @contextlib.asynccontextmanager
            async def opened():
                reader, writer = await asyncio.open_connection(*listening.getsockname())
                try:
                    yield reader, writer
                finally:
                    writer.close()

            try:
                await asyncio.wait_for(test(opened), 60)
            finally:
                server.should_exit = True
                await serving

    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(whole())


async def rest(reader):
    """What comes until the server closes the connection, which it has to. Where it closes while more of the request
    comes, that is a reset."""
    come = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := await asyncio.wait_for(reader.read(1 << 16), LATE_S):
            come += piece
    return come


async def drip(writer, piece=b"x"):
    """Send so little so often that no pause is long, until the connection is closed."""
    with contextlib.suppress(ConnectionError):
        for _ in range(int(LATE_S / 0.05)):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\n"])
def test_a_head_that_does_not_come_closes_its_connection(sent):
    async def test(opened):
        async with opened() as (reader, writer):
            writer.write(sent)
            assert await rest(reader) == b""

    run(test)


@pytest.mark.parametrize("before", [0, 1])
def test_a_head_that_comes_drop_by_drop_closes_its_connection(before):
    """Be it the first one, or the next."""

    async def test(opened):
        async with opened() as (reader, writer):
            for _ in range(before):
                writer.write(HEAD + b"\r\n" + b"x" * 20)
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                assert await reader.readexactly(2) == b"20"
            writer.write(HEAD)
            dripping = asyncio.create_task(drip(writer, b"x-more: 1\r\n"))
            assert await rest(reader) == b""
            await dripping

    run(test)


def test_a_body_that_comes_drop_by_drop_is_refused():
    async def test(opened):
        async with opened() as (reader, writer):
            writer.write(HEAD.replace(b" 20", b" 9000") + b"\r\n")
            dripping = asyncio.create_task(drip(writer))
            head, _, body = (await rest(reader)).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408")
            assert b"connection: close" in head.lower()
            assert json.loads(body)["error"]["code"] == "body_too_slow"
            await dripping

    run(test)


@pytest.mark.parametrize("start", [b"POST /deaf HTTP/1.1", b"GET / HTTP/1.1"])
def test_a_body_that_nobody_reads_closes_its_connection(start):
    """The answer is there before it, and its client goes on sending."""

    async def test(opened):
        async with opened() as (reader, writer):
            writer.write(HEAD.replace(b"POST / HTTP/1.1", start).replace(b" 20", b" 9000") + b"\r\n")
            dripping = asyncio.create_task(drip(writer))
            assert (await rest(reader)).startswith((b"HTTP/1.1 200", b"HTTP/1.1 405"))
            await dripping

    run(test)


def test_what_comes_in_time_is_served_however_long_its_pieces_take_together(monkeypatch):
    monkeypatch.setattr(gate, "_BODY_BYTES_PER_S", 10)

    async def test(opened):
        async with opened() as (reader, writer):
            for _ in range(2):
                writer.write(HEAD + b"\r\n")
                for _ in range(4):
                    writer.write(b"x" * 5)  # for half a second more
                    await asyncio.sleep(0.1)
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
                assert await reader.readexactly(2) == b"20"
                await asyncio.sleep(2 * SOON_S)  # the time between two requests is another one

    run(test)


@pytest.mark.parametrize("path", ["much", "whole"])
@pytest.mark.parametrize("more", ["", "connection: close\r\n"])
def test_an_answer_that_nobody_reads_is_cut_off(path, more):
    async def test(opened):
        async with opened() as (reader, writer):
            writer.write(f"GET /{path} HTTP/1.1\r\nhost: here\r\n{more}\r\n".encode())
            await asyncio.sleep(4 * SOON_S)
            come = b""
            with contextlib.suppress(ConnectionError):
                come = await rest(reader)
            assert len(come) < 65_536 * MUCH

    run(test)


@pytest.mark.parametrize("path", ["much", "whole"])
def test_an_answer_that_is_read_with_pauses_is_whole(path):
    """All of it takes a few times what a client has for something of it."""

    async def test(opened):
        async with opened() as (reader, writer):
            writer.write(f"GET /{path} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n".encode())
            come, loop = 0, asyncio.get_running_loop()
            begun_s = loop.time()
            while piece := await asyncio.wait_for(reader.read(1 << 20), LATE_S):
                come += len(piece)
                await asyncio.sleep(SOON_S / 20)
            assert come > 65_536 * MUCH
            assert loop.time() - begun_s > 2 * SOON_S

    run(test)


def test_an_answer_whose_end_nobody_reads_is_cut_off(monkeypatch):
    """Less is left than what makes the server pause: it has sent all, and would wait for the client without end."""
    lost = asyncio.Event()
    monkeypatch.setattr(
        connections.Connection, "connection_lost", lambda self, exc, base=connections.Connection.connection_lost: (
            base(self, exc), lost.set(),
        ),
    )  # fmt: skip
    monkeypatch.setattr(connections.Connection, "pause_writing", lambda self: None)

    async def test(opened):
        async with opened() as (_, writer):
            writer.write(b"GET /whole HTTP/1.1\r\nhost: here\r\n\r\n")
            await asyncio.wait_for(lost.wait(), LATE_S)

    run(test)


def test_more_connections_than_there_may_be_are_told(monkeypatch):
    monkeypatch.setattr(connections, "most_connections", lambda: 2)

    async def test(opened):
        async with opened(), opened() as (_, second):
            await asyncio.sleep(0.05)
            async with opened() as (reader, writer):
                assert (await rest(reader)).startswith(b"HTTP/1.1 503 ")
            second.close()
            await asyncio.sleep(0.05)
            async with opened() as (reader, writer):
                writer.write(HEAD + b"\r\n" + b"x" * 20)
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")

    run(test)


@pytest.mark.parametrize(("limit", "most"), [(1024, 512), (65_536, 65_024), (600, 300), (-1, 2**31)])
def test_descriptors_are_left_for_ranks(monkeypatch, limit, most):
    monkeypatch.setattr(connections.resource, "getrlimit", lambda kind: (limit, limit))
    assert connections.most_connections() == most
