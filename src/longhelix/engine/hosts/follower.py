"""What a host does that is not the first: it joins, runs its ranks, and passes messages between them and the engine."""

import math
import os
import secrets
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec
import zmq

from longhelix.engine.hosts import link
from longhelix.engine.hosts.link import FollowerLink
from longhelix.engine.hosts.membership import Membership
from longhelix.engine.hosts.messages import (
    ENCODER,
    HOST,
    RANKS,
    START,
    TO_FOLLOWER,
    Admitted,
    Check,
    Checked,
    FromFollower,
    Halt,
    Hello,
    Here,
    Launch,
    Leave,
    Probe,
    RankEnded,
    Refused,
)
from longhelix.engine.workers import torchrun
from longhelix.engine.workers.process import signal_name
from longhelix.engine.workers.ranks import Ranks
from longhelix.engine.workers.transport import EngineSocket, is_heartbeat, with_place
from longhelix.errors import EngineError, UserError

_POLL_MS = 100
_LISTENS_S = 3.0  # how long the engine counts as listening after a sign of it
_CONNECT_S = 5.0
_REFUSALS = 10  # connections that host 0 has closed before this host gives up
_JOIN_S = 600.0
_REPORT_S = 1.0
_FIRST_TELL_S, _TELL_S = 1.0, 20.0
_LOOK_UP_S = 2.0  # time between two looks whether host 0 has another address


def follow(membership: Membership, hello: Callable[[int], Hello], model_path: str, tell: Callable[[str], None]) -> None:
    """Run this host's ranks until the engine ends. Joins again whenever the connection to host 0 is lost.

    Args:
        hello: returns what to send to join, given the port for the check of connections.
        model_path: the model on this host.
        tell: receives lines about what happens.

    Raises:
        UserError: host 0 refuses this host, or cannot be found.
        EngineError: the connection is lost, and a launcher starts all hosts again.
    """
    while True:
        with _Session(membership, hello, model_path, tell) as session:
            if session.run():
                tell("host 0 has ended the engine")
                return
        if membership.is_launched:
            raise EngineError("the connection to host 0 is lost: the launcher must start all hosts again")
        tell("the connection to host 0 is lost: joining again")
        membership = membership.looked_up()
        _await_address(membership, tell)


def _await_address(membership: Membership, tell: Callable[[str], None]) -> None:
    """Wait until this host has its address again. Raises UserError if it does not get it within ten minutes."""
    deadline_s, told = time.monotonic() + _JOIN_S, False
    while True:
        try:
            link.listener(membership.address).close()
            return
        except UserError:
            if time.monotonic() > deadline_s:
                raise
        if not told:
            tell(f"this host has lost its address {membership.address}: waiting for it")
            told = True
        time.sleep(_LOOK_UP_S)


class _Session:
    """One connection to host 0, and the ranks that it has started."""

    def __init__(
        self,
        membership: Membership,
        hello: Callable[[int], Hello],
        model_path: str,
        tell: Callable[[str], None],
    ) -> None:
        self._membership, self._model_path, self._tell = membership, model_path, tell
        self._ranks: Ranks | None = None
        self._local: EngineSocket | None = None
        self._launch = 0
        self._ended_s: dict[int, float] = {}  # when ranks have ended; infinity once that was reported
        self._unsent: deque[list[bytes]] = deque()
        self._is_admitted = False
        self._listens_until_s = 0.0
        self._probe = link.listener(membership.address)
        self._link = self._connect()
        self._hello = hello

    def __enter__(self) -> "_Session":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._end_ranks()
        finally:
            self._probe.close()
            self._link.close()

    def run(self) -> bool:
        """Pass messages until host 0 ends the engine (True), or the connection is lost (False)."""
        start_s = told_s = looked_s = time.monotonic()
        said_hello = False
        while True:
            self._link.look()
            if self._link.was_lost:
                return self._has_said_goodbye()
            now_s = time.monotonic()
            if not self._link.is_connected:
                if self._link.refusals >= _REFUSALS:
                    raise UserError(
                        f"{self._place} refuses the connection of this host: give the same --cluster-secret-file on "
                        "every host, and check that longhelix listens there",
                        "invalid_cluster",
                    )
                if now_s - start_s > _JOIN_S:
                    raise UserError(
                        f"host 0 did not answer at {self._place} within {_JOIN_S:.0f} s: start it, or correct "
                        "--master-addr and --master-port",
                        "invalid_cluster",
                    )
                if now_s - told_s > _TELL_S or (told_s == start_s and now_s - start_s > _FIRST_TELL_S):
                    why = "".join(f" ({each})" for each in link.failures({0: self._place}, 1.0).values())
                    self._tell(f"waiting up to {_JOIN_S / 60:.0f} minutes for host 0 at {self._place}{why}")
                    told_s = now_s
                if now_s - looked_s > _LOOK_UP_S:
                    self._look_up()
                    looked_s = time.monotonic()
            elif not said_hello:
                self._send(self._hello(self._probe.getsockname()[1]))
                said_hello = True
            if self._await():
                return True
            self._look_at_ranks()

    @property
    def _place(self) -> str:
        return f"{self._membership.first_address}:{self._membership.port}"

    def _connect(self) -> FollowerLink:
        """Begin to connect to host 0."""
        membership = self._membership
        identity = f"{membership.node_rank}-{secrets.token_hex(8)}"
        return FollowerLink(identity, membership.first_address, membership.port, membership.keys)

    def _look_up(self) -> None:
        """Connect to the address that host 0 has now, if that is another one."""
        found = self._membership.looked_up()
        if found != self._membership:
            self._membership = found
            self._link.close()
            self._link = self._connect()
            self._tell(f"{found.master_addr} has another address: connecting to {self._place}")

    def _has_said_goodbye(self) -> bool:
        """Whether host 0 has ended the engine before the connection was lost. Raises UserError if it refused us."""
        while self._link.socket.poll(0):
            kind, payload, *_ = self._link.socket.recv_multipart()
            if kind == HOST:
                match TO_FOLLOWER.decode(payload):
                    case Refused(reason, code):
                        raise UserError(reason, code)
                    case Leave():
                        return True
        return False

    def _await(self) -> bool:
        """Wait a moment for messages and pass them on. Returns True if the engine has ended."""
        self._flush()
        poller = zmq.Poller()
        poller.register(self._link.socket, zmq.POLLIN)
        if self._local is not None and not self._unsent:  # otherwise ranks wait until host 0 reads again
            poller.register(self._local.socket, zmq.POLLIN)
        ready = dict(poller.poll(_POLL_MS))
        if self._local is not None and self._local.socket in ready:
            self._pass_up()
        while self._link.socket.poll(0):
            if self._obey(self._link.socket.recv_multipart()):
                return True
        return False

    def _pass_up(self) -> None:
        """Send what ranks have said, in one message."""
        frames = [RANKS, self._launch.to_bytes(4)]
        while (found := self._local.receive_frames(0.0)) is not None:
            if time.monotonic() < self._listens_until_s or not is_heartbeat(found[0]):
                frames += found
        if len(frames) > 2:
            self._unsent.append(frames)
            self._flush()

    def _obey(self, frames: list[bytes]) -> bool:
        kind, *rest = frames
        if kind in (RANKS, START):
            ranks, payload = msgspec.msgpack.decode(rest[0]), b"".join(rest[1:])
            if kind == START:
                payload = with_place(payload, self._model_path, self._membership.interface)
            if self._local is not None:
                self._local.forward(ranks, payload)
            return False
        match TO_FOLLOWER.decode(rest[0]):
            case Admitted() if not self._is_admitted:
                self._is_admitted = True
                held = self._membership.hosts.ranks[self._membership.node_rank]
                ranks = f"rank{'s'[: len(held) != 1]} {', '.join(map(str, held))}"
                self._tell(f"joined {self._place} as host {self._membership.node_rank}, for {ranks}")
            case Probe(number):
                self._listens_until_s = time.monotonic() + _LISTENS_S
                self._send(Here(number))
            case Check(addresses):
                self._send(Checked(link.failures(addresses, _CONNECT_S)))
                link.drop_connections(self._probe)
            case Launch(launch):
                self._launch = launch
                try:
                    self._start_ranks()
                except (EngineError, UserError) as error:
                    self._report(self._membership.hosts.ranks[self._membership.node_rank][0], str(error), is_cause=True)
                    raise
            case Halt():
                self._end_ranks()
            case Refused(reason, code):
                raise UserError(reason, code)
            case Leave():
                return True
        return False

    def _start_ranks(self) -> None:
        self._end_ranks()
        self._ended_s.clear()
        self._ranks = Ranks(torchrun.make_directory() if torchrun.is_active() else None)
        self._local = EngineSocket(self._ranks.directory)
        held = self._membership.hosts.ranks[self._membership.node_rank]
        self._ranks.start("longhelix.engine.workers.worker", [torchrun.own_rank()] if torchrun.is_active() else held)

    def _end_ranks(self) -> None:
        ranks, local, self._ranks, self._local = self._ranks, self._local, None, None
        self._unsent.clear()
        if ranks is not None:
            ranks.kill()
            if local is not None:
                local.close()
            ranks.close()

    def _look_at_ranks(self) -> None:
        if self._ranks is None:
            return
        for rank, status in self._ranks.statuses().items():
            process = self._ranks.processes[rank]
            is_cause = status < 0 or bool(process.untold)
            # A rank that ends by itself usually tells the engine why, which takes a moment.
            ended_s = self._ended_s.setdefault(rank, time.monotonic())
            if (is_cause or (status and time.monotonic() - ended_s > _REPORT_S)) and ended_s < math.inf:
                self._ended_s[rank] = math.inf
                how = f"was ended by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
                self._report(rank, f"its process {process.pid} {process.untold or how}", is_cause)

    def _report(self, rank: int, words: str, is_cause: bool) -> None:
        place = f"on host {self._membership.node_rank} ({self._membership.address})"
        self._send(RankEnded(self._launch, rank, f"{words} {place}", is_cause))

    def _send(self, message: FromFollower) -> None:
        self._unsent.append([HOST, ENCODER.encode(message)])
        self._flush()

    def _flush(self) -> None:
        """Send what waits, as far as there is room."""
        with suppress(zmq.Again):
            while self._unsent:
                self._link.socket.send_multipart(self._unsent[0], zmq.NOBLOCK)
                self._unsent.popleft()


def tell(line: str) -> None:
    """Print a line about this host to standard error."""
    os.write(2, f"longhelix: {line}\n".encode())
