"""The first host's view of all hosts: it admits them, checks that they fit together, and sends them messages."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

import msgspec
import zmq

from longhelix.compute.runner.meeting import Meeting
from longhelix.engine.hosts import link
from longhelix.engine.hosts.link import FirstLink
from longhelix.engine.hosts.membership import SAME_PROCESSORS, Membership
from longhelix.engine.hosts.messages import (
    ENCODER,
    FROM_FOLLOWER,
    HOST,
    RANKS,
    START,
    Admitted,
    Check,
    Checked,
    Halt,
    Hello,
    Here,
    Launch,
    Leave,
    Probe,
    RankEnded,
    Refused,
    ToFollower,
)
from longhelix.engine.places import Places
from longhelix.errors import EngineError, UserError

JOIN_S = 600.0  # longest time to wait for other hosts, which a scheduler may start minutes later
_ANSWER_S, _TELL_S = 1.0, 20.0  # time until the first message about hosts that are missing, and between two of them
_CHECK_S, _CONNECT_S = 20.0, 5.0
_CLOCKS_S = 30.0  # largest difference between clocks
_POLL_MS = 100
_PROBE_S = 1.0  # time between two signs of the engine to its hosts

# What hosts must have in common: fields of Hello, what they are, and what to do.
_COMMON = (
    ("version", "has other versions", "install the same versions on all hosts"),
    ("kernels", "has native kernels for another instruction set", SAME_PROCESSORS),
    ("nnodes", "was started with another --nnodes", "start all hosts with the same value"),
    ("layout", "was started with another layout", "start all hosts with the same layout"),
    ("settings", "was started with other settings", "start all hosts with the same options"),
    ("model", "has other model files", "use the same model and revision on all hosts"),
)


class Cluster:
    """All hosts of an engine, as host 0 sees them.

    The followers stay when the engine's ranks start again.

    Attributes:
        membership: place of this host.
        sent: number of messages for ranks that each other host has got, by node rank.
    """

    def __init__(self, membership: Membership, hello: Callable[[int], Hello], tell: Callable[[str], None]) -> None:
        """Listen for the other hosts, wait until all have joined, and check them.

        Args:
            hello: returns what a follower would send for this host, given its port for the check of connections.
            tell: receives lines about hosts that are missing.

        Raises:
            UserError: a host does not fit, cannot be reached or has not joined. The other hosts get the same error.
        """
        self.membership = membership
        self._listener = link.listener(membership.address)
        self._own, self._tell = hello(self._listener.getsockname()[1]), tell
        # Looked up for every rank in every step.
        self._nodes = {rank: node for node, ranks in enumerate(membership.hosts.ranks) for rank in ranks}
        self._identities: dict[int, bytes] = {}
        self._admitted: set[bytes] = set()  # identities of hosts that were checked
        self._hellos = {0: self._own}
        self._probes = 0  # number of the last probe
        self._next_probe_s = 0.0
        self._answered: dict[int, int] = {}  # number of the last probe that a node has answered
        self._checked: dict[bytes, dict[int, str]] = {}  # which hosts a host cannot reach, by its identity
        self._probed_s, self._stranger_s = 0.0, -_TELL_S
        self._launch = 0
        self._is_closed = False
        self.sent: Counter[int] = Counter()
        self._arrived: deque[tuple[bytes, bytes]] = deque()
        self._ended: deque[RankEnded] = deque()
        try:
            self._link = FirstLink(membership.first_address, membership.port, membership.keys)
        except BaseException:
            self._listener.close()
            raise
        try:
            self._await_all()
        except UserError as error:
            self.close(error)
            raise
        except BaseException:
            self.close()
            raise

    @property
    def places(self) -> Places:
        """Which host runs each rank, and what the hosts have."""
        facts = [self._hellos[node].facts for node in range(self.membership.nnodes)]
        return Places(
            self.membership.hosts,
            cores=[each.cores for each in facts],
            free_bytes=[each.free_bytes for each in facts],
            gpu_bytes=[each.gpu_bytes for each in facts],
            gpu_capabilities=[each.gpu_capabilities for each in facts],
        )

    @property
    def socket(self) -> zmq.Socket:
        """The socket on which messages from hosts arrive, for a poller."""
        return self._link.socket

    @property
    def meeting(self) -> Meeting:
        """Where ranks meet, as the ranks of this host see it, before rank 0 has chosen a port."""
        return Meeting(self.membership.first_address, 0, self.membership.interface)

    def describe(self, node: int) -> str:
        """Return a host's name for messages, such as `host 1 (10.0.0.2)`."""
        return f"host {node} ({self._hellos[node].facts.address})"

    def launch(self, on_wait: Callable[[], None]) -> None:
        """Start the processes of all ranks on other hosts, after all hosts have joined and answered.

        Args:
            on_wait: called again and again while hosts are missing. If it raises an exception, the launch is aborted.

        Raises:
            EngineError: a host has not joined again.
        """
        self._launch += 1
        try:
            self._await_all(on_wait)
        except UserError as error:
            raise EngineError(str(error)) from error
        # A host that joined again during the wait ended ranks of an earlier launch, not of this one.
        self._arrived.clear()
        self._ended.clear()
        for node in self._identities:
            self._send(node, Launch(self._launch))

    def halt(self) -> None:
        """End the ranks on other hosts."""
        for node in self._identities if not self._is_closed else ():
            self._send(node, Halt())

    def forward(self, ranks: Iterable[int], payload: bytes, is_start: bool = False) -> set[int]:
        """Send a message to ranks, once for each of their hosts. Returns the ranks that are on this host."""
        by_node: dict[int, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self._nodes[rank], []).append(rank)
        own = set(by_node.pop(0, ()))
        for node, held in by_node.items():
            identity = self._identities.get(node)
            if identity is not None:  # a host that is gone is found because its ranks are silent
                self._link.send(identity, START if is_start else RANKS, ENCODER.encode(held), *link.pieces(payload))
                self.sent[node] += 1
        return own

    def take(self) -> tuple[bytes, bytes] | RankEnded | None:
        """Return the next message that has arrived from ranks, with the sender's identity. None if there is none.

        The end of a rank's process is a message too.

        Raises:
            EngineError: the connection to a host is lost.
        """
        if time.monotonic() - self._probed_s > _PROBE_S:
            self._probed_s = time.monotonic()
            self._tell_of_strangers()
            for node in self._missing():
                raise EngineError(
                    f"{self.describe(node)} is gone: it was stopped or killed, or its network was cut off"
                )
        while not self._arrived and not self._ended and self._link.socket.poll(0):
            self._read()
        if self._arrived:
            return self._arrived.popleft()
        return self._ended.popleft() if self._ended else None

    def close(self, error: UserError | None = None, *, has_failed: bool = False) -> None:
        """Tell all followers to end, with an error if there is one, and close the socket.

        You may call this method more than once.

        Args:
            error: the error with which this host ends.
            has_failed: whether the engine has failed. If a launcher starts all hosts again, followers then end with an
                error too, because launchers do not start again what has ended well.
        """
        if not self._is_closed:
            self._is_closed = True
            last = Leave() if error is None else Refused(str(error), error.code)
            for node in self._identities if error or not (has_failed and self.membership.is_launched) else ():
                self._send(node, last)
            self._link.close()
            self._listener.close()

    def _send(self, node: int, message: ToFollower) -> bool:
        return self._link.send(self._identities[node], HOST, ENCODER.encode(message))

    def _await_all(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """Wait until all hosts have joined, and admit those that are new, after a check that hosts reach each other."""
        while True:
            self._await_joined(on_wait)
            if self._admitted.issuperset(self._identities.values()):
                return
            checked = self._check_connections(on_wait)
            for node, identity in self._identities.items():
                if identity in checked and identity not in self._admitted:
                    self._admitted.add(identity)
                    self._send(node, Admitted())
                    self._tell(f"{self.describe(node)} has joined")

    def _await_joined(self, on_wait: Callable[[], None]) -> None:
        """Wait until all hosts have joined and have answered a probe of this call.

        ZeroMQ notices only later that a host was cut off, and older messages of the host may still arrive.
        """
        start_s = time.monotonic()
        first_probe, tell_s = self._probes + 1, start_s + _ANSWER_S
        self._next_probe_s = start_s
        while missing := self._missing(first_probe):
            self._link.socket.poll(_POLL_MS)
            while self._link.socket.poll(0):
                self._read(is_start=self._launch == 0)
            self._tell_of_strangers()
            on_wait()
            now_s = time.monotonic()
            words = f"host{'s'[: len(missing) != 1]} {', '.join(map(str, sorted(missing)))}"
            if now_s - start_s > JOIN_S:
                raise UserError(
                    f"{words} did not join within {JOIN_S:.0f} s: start the same command there with --node-rank, and "
                    f"check that {self.membership.first_address}:{self.membership.port} can be reached from there",
                    "invalid_cluster",
                )
            if now_s > tell_s:
                self._tell(f"waiting for {words} at {self.membership.first_address}:{self.membership.port}")
                tell_s = now_s + _TELL_S

    def _tell_of_strangers(self) -> None:
        if self._link.strangers() and time.monotonic() - self._stranger_s > _TELL_S:
            self._stranger_s = time.monotonic()
            self._tell("a host with another cluster secret has tried to join: give the same secret on every host")

    def _missing(self, first_probe: int = 0) -> set[int]:
        """Tell the hosts from time to time that the engine listens, and return the nodes that are missing.

        A node is missing if it has not joined, if its connection is lost, or if it has not answered `first_probe` or a
        later probe. ZeroMQ closes the connection of a host that does not answer its heartbeats.
        """
        now_s = time.monotonic()
        if now_s >= self._next_probe_s:  # an answer to a probe must not cause the next one at once
            self._next_probe_s = now_s + _POLL_MS / 1000
            self._probes += 1
            for node in [node for node in self._identities if not self._send(node, Probe(self._probes))]:
                del self._identities[node]
        present = {node for node in self._identities if self._answered[node] >= first_probe}
        return set(range(1, self.membership.nnodes)) - present

    def _read(self, is_start: bool = False) -> None:
        """Read one message of a host. `is_start`: whether a host that does not fit is an error of this host too."""
        identity, kind, *rest = self._link.socket.recv_multipart()
        node = next((node for node, known in self._identities.items() if known == identity), None)
        if kind == RANKS:
            if node is not None and int.from_bytes(rest[0]) == self._launch:
                self._arrived.extend(zip(rest[1::2], rest[2::2], strict=True))
            return
        try:
            message = FROM_FOLLOWER.decode(rest[0])
        except (msgspec.DecodeError, IndexError):  # ValidationError is a DecodeError
            self._refuse(identity, "a host has another version of longhelix: install the same on all hosts", is_start)
            return
        match message:
            case Hello() as hello:
                self._welcome(identity, hello, is_start)
            case Here(number) if node is not None:
                self._answered[node] = number
            case RankEnded(launch) as ended if node is not None and launch == self._launch:
                self._ended.append(ended)
            case Checked(failures) if node is not None:
                self._checked[identity] = failures

    def _welcome(self, identity: bytes, hello: Hello, is_start: bool) -> None:
        """Take in a follower, or refuse it."""
        reason = self._objection(hello, is_start)
        if reason is not None:
            self._refuse(identity, reason, is_start)
            return
        node = hello.node_rank
        if self._identities.get(node) not in (None, identity):
            if self._hellos[node].process != hello.process and self._send(node, Probe(self._probes)):
                taken = (
                    f"node rank {node} is already taken by {self.describe(node)}, so {hello.facts.address} cannot have "
                    "it too: give each host its own --node-rank"
                )
                self._refuse(identity, taken)
                return
            if self._launch:
                words = f"{self.describe(node)} has joined again, and its ranks have ended"
                first = self.membership.hosts.ranks[node][0]
                self._ended.append(RankEnded(self._launch, first, words, is_cause=True))
        self._identities[node], self._hellos[node] = identity, hello
        self._answered[node] = self._probes

    def _refuse(self, identity: bytes, reason: str, is_start: bool = False) -> None:
        self._link.send(identity, HOST, ENCODER.encode(Refused(reason)))
        if is_start:
            raise UserError(reason, "invalid_cluster")
        self._tell(f"a host was refused: {reason}")

    def _objection(self, hello: Hello, is_start: bool) -> str | None:
        """Return why a host does not fit, or None. An engine that runs may read a host's time late."""
        name = f"host {hello.node_rank} ({hello.facts.address})"
        for field, words, remedy in _COMMON:
            own, other = getattr(self._own, field), getattr(hello, field)
            if own != other:
                return f"{name} {words} ({other or 'none'}) than host 0 ({own or 'none'}): {remedy}"
        if not 0 < hello.node_rank < self.membership.nnodes:
            return f"{name} has a node rank that is taken or too large: number the hosts from 0 to {hello.nnodes - 1}"
        off_s = hello.time_s - time.time()
        if is_start and abs(off_s) > _CLOCKS_S:
            return f"the clock of {name} is {off_s:+.0f} s off that of host 0: synchronise the clocks"
        return None

    def _check_connections(self, on_wait: Callable[[], None]) -> set[bytes]:
        """Have all hosts connect to each other.

        Returns:
            The identities of the hosts that have done so. A host that joins again meanwhile is not among them.

        Raises:
            UserError: a host cannot connect to another one, or does not answer.
        """
        addresses = {node: f"{each.facts.address}:{each.facts.probe_port}" for node, each in self._hellos.items()}
        asked, self._checked = dict(self._identities), {}
        for node in asked:
            self._send(node, Check({other: addresses[other] for other in addresses if other != node}))
        found = {0: link.failures({node: addresses[node] for node in asked}, _CONNECT_S)}
        deadline_s = time.monotonic() + _CHECK_S
        while unchecked := [
            node
            for node, identity in asked.items()
            if self._identities.get(node) == identity and identity not in self._checked
        ]:
            if time.monotonic() > deadline_s:
                raise UserError(
                    f"{self.describe(min(unchecked))} joined, but does not answer: check the network", "invalid_cluster"
                )
            on_wait()
            if self._link.socket.poll(_POLL_MS):
                self._read()
        link.drop_connections(self._listener)
        found |= {node: self._checked[identity] for node, identity in asked.items() if identity in self._checked}
        for node, failures in sorted(found.items()):
            for other, why in failures.items():
                if other and self._identities.get(other) != asked[other]:
                    continue  # it has joined again meanwhile, with another port
                raise UserError(
                    f"{self.describe(node)} cannot connect to {self.describe(other)} ({why}): allow all TCP ports "
                    "between the hosts, or set --interface to the network that connects them",
                    "invalid_cluster",
                )
        return set(self._checked)
