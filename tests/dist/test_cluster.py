"""What host 0 makes of followers that are silent, or that join again."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from longhelix.engine.hosts import network
from longhelix.engine.hosts.cluster import Cluster
from longhelix.engine.hosts.link import FollowerLink, listener
from longhelix.engine.hosts.membership import Membership
from longhelix.engine.hosts.messages import (
    ENCODER,
    HOST,
    TO_FOLLOWER,
    Check,
    Checked,
    Facts,
    Hello,
    Here,
    Launch,
    Probe,
)
from longhelix.spec.hosts import Hosts

pytestmark = pytest.mark.dist

ADDRESS = "127.0.0.1"
WAIT_S = 20


def hello(node_rank, probe_port):
    facts = Facts(ADDRESS, probe_port, cores=1, free_bytes=1, gpu_bytes=[])
    return Hello(
        node_rank=node_rank,
        process=f"process of {node_rank}",
        facts=facts,
        time_s=time.time(),
        version="1",
        kernels="none",
        nnodes=2,
        model="m",
        layout="l",
        settings="",
    )


class Follower:
    """A connection of host 1. It answers while it is awake. Its last answer from before arrives while it sleeps.

    Attributes:
        launches: the launches that it was told of.
        asked: set when host 0 has asked it for a sign while it slept.
    """

    def __init__(self, port, identity="1-first"):
        self.awake, self.asked, self.launches = threading.Event(), threading.Event(), []
        self.awake.set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(identity, port))
        self._thread.start()

    def close(self):
        self._over.set()
        self._thread.join()

    def _run(self, identity, port):
        link, probe = FollowerLink(identity, ADDRESS, port, None), listener(ADDRESS)
        try:
            self._send(link, hello(1, probe.getsockname()[1]))
            while not self._over.is_set():
                if link.socket.poll(20):
                    self._answer(link, TO_FOLLOWER.decode(link.socket.recv_multipart()[1]))
        finally:
            probe.close()
            link.close()

    def _answer(self, link, message):
        match message:
            case Probe(number):
                if not self.awake.is_set():
                    self._send(link, Here(number - 1))
                    self.asked.set()
                while not self.awake.wait(0.1) and not self._over.is_set():
                    pass
                self._send(link, Here(number))
            case Check():
                self._send(link, Checked({}))
            case Launch(launch):
                self.launches.append(launch)

    def _send(self, link, message):
        link.socket.send_multipart([HOST, ENCODER.encode(message)])


@contextmanager
def joined():
    """Host 0 of two hosts, and its follower."""
    with listener(ADDRESS) as free:
        port = free.getsockname()[1]
    membership = Membership(
        nnodes=2,
        node_rank=0,
        master_addr=ADDRESS,
        first_address=ADDRESS,
        port=port,
        address=ADDRESS,
        interface=network.interface_of(ADDRESS),
        keys=None,
        hosts=Hosts.in_order([1, 1]),
        is_launched=False,
    )
    follower = Follower(port)
    try:
        cluster = Cluster(membership, lambda probe_port: hello(0, probe_port), tell=lambda line: None)
        try:
            yield cluster, follower
        finally:
            cluster.close()
    finally:
        follower.close()


def launch(cluster):
    """In time, or with the error that ends the wait."""
    deadline_s = time.monotonic() + WAIT_S

    def on_wait():
        assert time.monotonic() < deadline_s, "the hosts did not join"

    cluster.launch(on_wait)


def test_a_host_that_is_silent_for_a_while_takes_part_when_it_answers_again():
    """Its connection has not been lost, so it does not join again by itself."""
    with joined() as (cluster, follower), ThreadPoolExecutor() as pool:
        follower.awake.clear()
        launching = pool.submit(launch, cluster)
        assert follower.asked.wait(WAIT_S)
        time.sleep(4)  # nothing happens, which is the point
        assert not launching.done()
        assert follower.launches == []
        follower.awake.set()
        launching.result(WAIT_S)
        await_true(lambda: follower.launches == [1])


def test_a_host_that_joins_again_before_its_ranks_start_has_not_failed():
    """Its first connection is still open: it has noticed sooner than host 0 that the network was cut off."""
    with joined() as (cluster, follower), ThreadPoolExecutor() as pool:
        launch(cluster)
        follower.awake.clear()
        launching = pool.submit(launch, cluster)
        assert follower.asked.wait(WAIT_S)
        again = Follower(cluster.membership.port, identity="1-again")
        try:
            launching.result(WAIT_S)
            await_true(lambda: again.launches == [2])
            assert cluster.take() is None
        finally:
            again.close()


def test_a_host_that_joins_again_after_its_ranks_have_started_has_failed():
    with joined() as (cluster, _):
        launch(cluster)
        again = Follower(cluster.membership.port, identity="1-again")
        try:
            deadline_s = time.monotonic() + WAIT_S
            while (ended := cluster.take()) is None:
                assert time.monotonic() < deadline_s
            assert (ended.rank, ended.is_cause) == (1, True)
            assert ended.words == "host 1 (127.0.0.1) has joined again, and its ranks have ended"
        finally:
            again.close()


def await_true(is_true):
    deadline_s = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
