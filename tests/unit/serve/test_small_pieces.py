"""Each piece of an answer is sent at once, however small it is."""

import asyncio
import socket

import pytest

from longhelix.serve.server import Address, _listen

pytestmark = pytest.mark.unit


async def is_sent_at_once():
    """Whether a connection to the server sends a piece before the one ahead of it has been acknowledged."""
    opened = asyncio.get_running_loop().create_future()
    listening = _listen(Address(port=0))
    async with await asyncio.start_server(lambda _, writer: opened.set_result(writer), sock=listening):
        _, client = await asyncio.open_connection(*listening.getsockname())
        server = await opened
        found = server.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        server.close()
        client.close()
    return bool(found)


def test_no_piece_waits_for_the_one_ahead_of_it():
    assert asyncio.run(is_sent_at_once())
