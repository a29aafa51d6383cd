"""What host 0 makes of followers that are silent, or that join again."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

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


def hello(node_rank, probe_port, nnodes=2):
    facts = Facts(ADDRESS, probe_port, cores=1, free_bytes=1, gpu_bytes=[], gpu_capabilities=[])
    return Hello(
        node_rank=node_rank,
        process=f"process of {node_rank}",
        facts=facts,
        time_s=time.time(),
        version="1",
        kernels="none",
        nnodes=nnodes,
        model="m",
        layout="l",
        settings="",
    )


class Follower:
    """A connection of a follower. It answers while it is awake. Its last answer from before arrives while it sleeps.

    Attributes:
        launches: the launches that it was told of.
        asked: set when host 0 has asked it for a sign while it slept.
        probes: number of signs that host 0 has asked it for.
        checked: set when host 0 has asked it for a check. It answers if `answers_checks`.
    """

    def __init__(self, port, identity="1-first", answers_checks=True, nnodes=2):
        self.awake, self.asked, self.launches = threading.Event(), threading.Event(), []
        self.checked, self._answers_checks, self.probes = threading.Event(), answers_checks, 0
        self.awake.set()
        self._over, self._nnodes = threading.Event(), nnodes
        self._thread = threading.Thread(target=self._run, args=(identity, port))
        self._thread.start()

    def close(self):
        self._over.set()
        self._thread.join()

    def _run(self, identity, port):
        link, probe = FollowerLink(identity, ADDRESS, port, None), listener(ADDRESS)
        try:
            self._send(link, hello(int(identity[0]), probe.getsockname()[1], self._nnodes))
            while not self._over.is_set():
                if link.socket.poll(20):
                    self._answer(link, TO_FOLLOWER.decode(link.socket.recv_multipart()[1]))
        finally:
            probe.close()
            link.close()

    def _answer(self, link, message):
        match message:
            case Probe(number):
                self.probes += 1
                if not self.awake.is_set():
                    self._send(link, Here(number - 1))
                    self.asked.set()
                while not self.awake.wait(0.1) and not self._over.is_set():
                    pass
                self._send(link, Here(number))
            case Check():
                self.checked.set()
                if self._answers_checks:
                    self._send(link, Checked({}))
            case Launch(launch):
                self.launches.append(launch)

    def _send(self, link, message):
        link.socket.send_multipart([HOST, ENCODER.encode(message)])


def membership(nnodes=2):
    """The place of host 0, at a free port."""
    with listener(ADDRESS) as free:
        port = free.getsockname()[1]
    return Membership(
        nnodes=nnodes,
        node_rank=0,
        master_addr=ADDRESS,
        first_address=ADDRESS,
        port=port,
        address=ADDRESS,
        interface=network.interface_of(ADDRESS),
        keys=None,
        hosts=Hosts.in_order([1] * nnodes),
        is_launched=False,
    )


def cluster_at(place):
    return Cluster(place, lambda probe_port: hello(0, probe_port, place.nnodes), tell=lambda line: None)


@contextmanager
def joined():
    """Host 0 of two hosts, and its follower."""
    place = membership()
    with closing(Follower(place.port)) as follower, closing(cluster_at(place)) as cluster:
        yield cluster, follower


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


def test_a_host_that_joins_again_during_the_check_is_checked_itself():
    place = membership()
    with closing(Follower(place.port, answers_checks=False)) as first, ThreadPoolExecutor() as pool:
        joining = pool.submit(cluster_at, place)
        assert first.checked.wait(WAIT_S)
        with closing(Follower(place.port, identity="1-again")) as again, closing(joining.result(WAIT_S)):
            assert again.checked.is_set()


def test_a_host_is_asked_for_signs_at_most_every_tenth_of_a_second_while_another_is_missing():
    place = membership(nnodes=3)
    with closing(Follower(place.port, nnodes=3)) as first, ThreadPoolExecutor() as pool:
        start_s = time.monotonic()
        joining = pool.submit(cluster_at, place)
        time.sleep(2)
        probes, elapsed_s = first.probes, time.monotonic() - start_s
        with closing(Follower(place.port, "2-first", nnodes=3)), closing(joining.result(WAIT_S)):
            assert 0 < probes <= elapsed_s / 0.1 + 1


def await_true(is_true):
    deadline_s = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
