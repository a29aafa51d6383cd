"""Who reads something is never cut off, however much more is written meanwhile; who reads nothing is."""

import socket
import types

import pytest
import uvicorn
from uvicorn.server import ServerState

from longhelix.serve.connections import Connection

pytestmark = pytest.mark.unit


class Transport:
    """Keeps what is written until it is read."""

    def __init__(self, of_socket):
        self.waiting, self.is_cut_off, self._socket = 0, False, of_socket

    def get_extra_info(self, name):
        return self._socket if name == "socket" else None

    def write(self, data):
        self.waiting += len(data)

    def get_write_buffer_size(self):
        return self.waiting

    def abort(self):
        self.is_cut_off = True


class Clock:
    """An event loop, as far as it calls later: when it is told to."""

    def __init__(self):
        self.calls = []

    def call_later(self, delay_s, call):
        self.calls.append(call)
        return types.SimpleNamespace(cancel=lambda: self.calls.remove(call) if call in self.calls else None)


@pytest.fixture
def opened():
    """A connection whose client has sent its request, its transport, and a function that lets time go by."""
    here, there = socket.socketpair()
    with here, there:
        clock, transport = Clock(), Transport(here)
        config = uvicorn.Config(lambda scope: None, lifespan="off", log_config=None)
        connection = Connection(config, ServerState(), {}, _loop=clock)
        connection.connection_made(transport)
        connection._stop_waiting()

        def later():
            (call,) = clock.calls
            clock.calls.clear()
            call()

        yield connection, transport, later


def test_who_reads_less_than_is_written_stays(opened):
    connection, transport, later = opened
    connection.transport.write(b"x" * 1000)
    connection.pause_writing()
    for _ in range(3):
        transport.waiting -= 10
        connection.transport.write(b"x" * 500)
        later()
        assert not transport.is_cut_off


@pytest.mark.parametrize("written", [0, 500])
def test_who_reads_nothing_is_cut_off(opened, written):
    connection, transport, later = opened
    connection.transport.write(b"x" * 1000)
    connection.pause_writing()
    transport.waiting -= 10
    later()
    assert not transport.is_cut_off
    connection.transport.write(b"x" * written)
    later()
    assert transport.is_cut_off
