"""Large messages over a connection on which they take longer than the silence that ends it."""

import socket
import threading
import time
from contextlib import closing, suppress

import pytest

from longhelix.engine.hosts.link import FirstLink, FollowerLink, pieces

pytestmark = pytest.mark.dist

ADDRESS = "127.0.0.1"
BYTES_PER_S, WAIT_S = 40_000, 60
PAYLOAD = bytes(range(256)) * 1600  # 10 s at this rate; the connection ends after 7 s of silence at most


def free_port():
    with socket.create_server((ADDRESS, 0)) as opened:
        return opened.getsockname()[1]


class SlowRelay:
    """Passes one connection on, and limits the rate of what comes back from its other end."""

    def __init__(self, port):
        self.port, self._ends = free_port(), threading.Event()
        listening = socket.create_server((ADDRESS, self.port))
        self._thread = threading.Thread(target=self._run, args=(listening, port))
        self._thread.start()

    def close(self):
        self._ends.set()
        self._thread.join()

    def _run(self, listening, port):
        with listening, listening.accept()[0] as near, socket.create_connection((ADDRESS, port)) as far:
            near.settimeout(0.01)
            far.settimeout(0.01)
            while not self._ends.wait(0.02):
                with suppress(TimeoutError):
                    far.sendall(near.recv(4096))
                with suppress(TimeoutError):
                    near.sendall(far.recv(int(BYTES_PER_S * 0.03)))


def test_a_message_that_takes_longer_than_the_longest_silence_arrives():
    port = free_port()
    with (
        closing(FirstLink(ADDRESS, port, None)) as first,
        closing(SlowRelay(port)) as relay,
        closing(FollowerLink("1", ADDRESS, relay.port, None)) as follower,
    ):
        follower.socket.send_multipart([b"hello"])
        assert first.socket.poll(1000 * WAIT_S)
        identity, _ = first.socket.recv_multipart()
        start_s = time.monotonic()
        assert first.send(identity, *pieces(PAYLOAD))
        while not follower.socket.poll(100):
            follower.look()
            assert not follower.was_lost
            assert time.monotonic() - start_s < WAIT_S
        assert b"".join(follower.socket.recv_multipart()) == PAYLOAD
        assert time.monotonic() - start_s > 7
