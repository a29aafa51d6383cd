"""A follower finds host 0 again where that has another address."""

import socket
import threading
import time
from contextlib import closing

import pytest

from longhelix.engine.hosts import network
from longhelix.engine.hosts.follower import follow
from longhelix.engine.hosts.link import FirstLink
from longhelix.engine.hosts.membership import Membership
from longhelix.engine.hosts.messages import ENCODER, FROM_FOLLOWER, HOST, Facts, Hello, Leave
from longhelix.engine.options import EngineOptions
from longhelix.errors import UserError
from longhelix.spec.layout import Layout

pytestmark = pytest.mark.unit

LONGEST_S = 20


class Name:
    """The name of host 0. address: None while the name is unknown."""

    def __init__(self, address):
        self.address = address
        self.was_unknown = threading.Event()

    def resolved(self, name):
        if self.address is None:
            self.was_unknown.set()
            raise UserError(f"the host {name!r} has no IPv4 address")
        return self.address


@pytest.fixture
def name(monkeypatch):
    name = Name("127.0.0.1")
    monkeypatch.setattr(network, "resolved", name.resolved)
    return name


@pytest.fixture
def port():
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        return free.getsockname()[1]


def hello(probe_port):
    facts = Facts("127.0.0.1", probe_port, cores=1, free_bytes=1, gpu_bytes=[], gpu_capabilities=[])
    return Hello(
        node_rank=1,
        process="a",
        facts=facts,
        time_s=0.0,
        version="",
        kernels="",
        nnodes=2,
        model="",
        layout="",
        settings="",
    )


def start(port):
    """A follower, and what it tells."""
    options = EngineOptions(nnodes=2, node_rank=1, master_addr="localhost", master_port=port)
    told = []
    follower = threading.Thread(
        target=follow, args=(Membership.of(options, Layout(kvp=2)), hello, "", told.append), daemon=True
    )
    follower.start()
    return follower, told


def joined(first):
    """The identity of the follower, once it has joined."""
    assert first.socket.poll(1000 * LONGEST_S)
    identity, kind, message = first.socket.recv_multipart()
    assert kind == HOST
    assert FROM_FOLLOWER.decode(message).node_rank == 1
    return identity


def end(first, identity, follower):
    first.send(identity, HOST, ENCODER.encode(Leave()))
    follower.join(LONGEST_S)
    assert not follower.is_alive()


def test_it_joins_host_0_at_the_address_that_its_name_has_then(name, port):
    with closing(FirstLink("127.0.0.1", port, None)) as first:
        follower, told = start(port)
        joined(first)
        name.address = "127.0.0.2"
    time.sleep(3)
    with closing(FirstLink("127.0.0.2", port, None)) as first:
        end(first, joined(first), follower)
    assert f"waiting up to 10 minutes for host 0 at 127.0.0.2:{port} (Connection refused)" in told


def test_it_looks_again_while_it_waits(name, port):
    """Also while the name is unknown."""
    follower, told = start(port)
    name.address = None
    assert name.was_unknown.wait(LONGEST_S)
    name.address = "127.0.0.2"
    with closing(FirstLink("127.0.0.2", port, None)) as first:
        end(first, joined(first), follower)
    assert f"localhost has another address: connecting to 127.0.0.2:{port}" in told
