"""The engine's socket for ranks on this host and on others."""

from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec
import zmq

from longhelix.engine.hosts.cluster import Cluster
from longhelix.engine.hosts.messages import RankEnded
from longhelix.engine.workers.transport import EngineSocket, Failed, Start, ToEngine, ToWorker, decoded


def open_socket(directory: Path, cluster: Cluster | None) -> EngineSocket:
    """Open the socket for all ranks. `directory`: that of the ranks on this host."""
    return EngineSocket(directory) if cluster is None else HostsSocket(directory, cluster)


class HostsSocket(EngineSocket):
    """Reaches ranks of other hosts through their followers. Each host gets a message once, for all of its ranks."""

    def __init__(self, directory: Path, cluster: Cluster) -> None:
        super().__init__(directory)
        self._cluster = cluster
        self._messages = msgspec.msgpack.Encoder()

    def send(self, ranks: Iterable[int], message: ToWorker) -> None:
        self._spread(ranks, message, is_start=False)

    def start(self, ranks: Collection[int], message: Start) -> None:
        self._spread(ranks, message, is_start=True)

    def _spread(self, ranks: Iterable[int], message: ToWorker, is_start: bool) -> None:
        payload = self._messages.encode(message)
        self.forward(self._cluster.forward(ranks, payload, is_start), payload)

    def receive(self, timeout_s: float) -> tuple[int, ToEngine] | None:
        found = self._from_hosts() or super().receive(0.0)
        if found is not None:
            return found
        poller = zmq.Poller()
        for source in (self.socket, self._cluster.socket):
            poller.register(source, zmq.POLLIN)
        poller.poll(timeout_s * 1000)
        return self._from_hosts() or super().receive(0.0)

    def _from_hosts(self) -> tuple[int, ToEngine] | None:
        match self._cluster.take():
            case RankEnded(_, rank, words, is_cause):
                return rank, Failed(words, lost_peer=not is_cause, user_error_code="")
            case identity, payload:
                return decoded(identity, payload)
        return None
