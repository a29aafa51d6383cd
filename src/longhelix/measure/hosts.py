"""Hosts that measure together. They run the same command at the same time, and meet through a store on host 0."""

import hmac
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from longhelix.compute.machine import host
from longhelix.compute.runner.meeting import Meeting
from longhelix.engine.hosts.launcher import with_launcher
from longhelix.engine.hosts.membership import SAME_PROCESSORS, Membership, kernels, versions
from longhelix.engine.options import EngineOptions
from longhelix.engine.places import Places
from longhelix.engine.workers import torchrun
from longhelix.errors import EngineError, UserError
from longhelix.measure.shared_store import SharedStore, client
from longhelix.spec.hosts import Hosts
from longhelix.spec.layout import Layout, split

_JOIN_S = 600.0  # longest time to wait for other hosts, which a scheduler may start minutes later
_WAIT_S = 3600.0  # longest time to wait for a measurement of another host
_LEAVE_S = 5.0  # how long host 0 stays after a failure, until the others know of it
_RANKS_WAIT = timedelta(hours=1)  # how long a rank waits for others, which may load models meanwhile
_POLL_S = 0.05
_BEAT_S, _SILENCE_S = 2.0, 20.0  # time between two signs of a host, and after which a host without signs is gone
_FAILED = "failed"  # key of the first error with which a host has ended
_MEETING = "meeting.json"
_SEE = "see what the host has printed"
_MODEL = "the model on this host"  # stands for its path in jobs that go from host to host


class MeasuringHosts:
    """The hosts that run a measuring command, as one of them sees them.

    Attributes:
        node_rank: number of this host.
        nnodes: number of hosts.
    """

    def __init__(self, membership: Membership, command: Sequence[str], tell: Callable[[str], None]) -> None:
        """Meet the other hosts.

        Args:
            membership: place of this host.
            command: words of the command that must be the same on all hosts.
            tell: receives a line about what this host waits for.

        Raises:
            UserError: the port is taken, a host does not come, or has another version, command or secret.
        """
        self.node_rank, self.nnodes, self._membership = membership.node_rank, membership.nnodes, membership
        self._worlds, self._model_path = 0, ""
        self._signs = [0] * self.nnodes  # of each host, as far as this one has counted
        self._heard_s = [time.monotonic()] * self.nnodes
        self._next_look_s = 0.0
        self._has_ended, self._is_alone = threading.Event(), False  # is_alone: the store is gone
        place = f"{membership.first_address}:{membership.port}"
        if self.node_rank == 0:
            self._store = SharedStore.host(membership.first_address, membership.port)
            tell(f"waiting for the other hosts at {place}")
        else:
            tell(f"waiting for host 0 at {place}")
            self._store = SharedStore.join(membership.first_address, membership.port, _JOIN_S)
        own = {
            "version": versions(),
            "kernels": kernels(),
            "nnodes": self.nnodes,
            "command": " ".join(command),
            "cores": host.cores(),
            "free_bytes": host.available_bytes(),
        }
        nonce = self._take_place()
        # With a client of its own, because signs must not wait for other calls.
        self._signs_store = SharedStore.join(membership.first_address, membership.port, _JOIN_S)
        self._signs_store.add(_signs_of(self.node_rank), 1)
        threading.Thread(target=self._give_signs, daemon=True).start()
        try:
            self._facts = self._gather(own, nonce)
        except BaseException as error:
            self.leave(error)
            raise

    @classmethod
    def of(
        cls, settings: dict[str, Any], command: Sequence[str], tell: Callable[[str], None]
    ) -> "MeasuringHosts | None":
        """Meet the hosts that the engine options in `settings` name. Returns None for a command on one host."""
        launched = torchrun.ranks_of_host()
        if launched is not None and len(launched) > 1:
            raise UserError(
                f"torchrun started {len(launched)} processes on this host, but a command that measures starts its own "
                "ranks: set --nproc-per-node 1",
                "invalid_cluster",
            )
        options = with_launcher(EngineOptions(**settings))
        layout = Layout(kvp=options.nnodes or 1)  # each host has at least one rank
        membership = Membership.of(options, layout)
        return None if membership is None else cls(membership, command, tell)

    def hosts(self, size: int) -> Hosts:
        """Place ranks on the hosts. Raises UserError if there are fewer ranks than hosts."""
        if size < self.nnodes:
            raise UserError(
                f"a layout has {size} rank{'s'[: size != 1]}, but there are {self.nnodes} hosts: choose a layout with "
                "at least one rank per host",
                "invalid_cluster",
            )
        return Hosts.in_order([len(ranks) for ranks in split(size, self.nnodes)])

    def places(self, size: int) -> Places:
        """Place ranks on the hosts, with what each host has."""
        cores, free_bytes = ([facts[name] for facts in self._facts] for name in ("cores", "free_bytes"))
        return Places(
            self.hosts(size),
            cores,
            free_bytes,
            gpu_bytes=[[]] * self.nnodes,
            gpu_capabilities=[[]] * self.nnodes,
        )

    def use_model(self, path: str) -> None:
        """Remember where the measured model is on this host."""
        self._model_path = path

    def begin_world(self, directory: Path, job: bytes, is_shared: bool) -> bytes:
        """Wait until all hosts begin their next measurement.

        If they measure together, tell the ranks of this host where to meet.

        Args:
            directory: directory of the ranks of this host.
            job: this host's job, as JSON.
            is_shared: whether the ranks of all hosts measure together, or each host by itself.

        Returns:
            The job to run, as JSON. If hosts measure together, this is the job of host 0, because ranks with different
            jobs would wait for each other forever.
        """
        self._worlds += 1
        began = [f"world {self._worlds}, host {node}" for node in range(self.nnodes)]
        own_path, any_path = (msgspec.json.encode(path).decode() for path in (self._model_path, _MODEL))
        self._store.set(began[self.node_rank], job.decode().replace(own_path, any_path))
        late = "did not begin the next measurement"
        self._await({key: f"host {node}" for node, key in enumerate(began)}, _WAIT_S, late, _SEE)
        if not is_shared:
            return job
        place = self._membership
        meeting = _WorldMeeting(
            Meeting(place.first_address, place.port, place.interface), self._worlds, self.node_rank == 0
        )
        (directory / _MEETING).write_bytes(msgspec.json.encode(meeting))
        return self._store.get(began[0]).decode().replace(any_path, own_path).encode()

    def row(self, rank: int, point: int) -> dict[str, Any]:
        """Return what a rank of another host has measured in the current world. Waits for it. Host 0 only."""
        key = self._place_of_row(rank, point)
        self._await({key: f"rank {rank}, which is on another host,"}, _WAIT_S, "gave no result", _SEE)
        return json.loads(self._store.get(key))

    def last_rows(self, ranks: Sequence[int], point: int, limit_s: float) -> dict[int, dict[str, Any]]:
        """Return what ranks of other hosts have said instead of a point, as far as it arrives within a time limit."""
        keys = {rank: self._place_of_row(rank, point) for rank in ranks}
        deadline_s = time.monotonic() + limit_s
        with suppress(EngineError):  # the store is gone
            while not self._store.has(list(keys.values())) and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
            return {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.has([key])}
        return {}

    def failure(self, limit_s: float) -> EngineError | UserError | None:
        """Return the error with which another host has ended. None if there is none within a time limit."""
        deadline_s = time.monotonic() + limit_s
        with suppress(EngineError):  # the store is gone
            while not self._store.has([_FAILED]) and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
            return self._failure() if self._store.has([_FAILED]) else None
        return None

    def _place_of_row(self, rank: int, point: int) -> str:
        return f"{_prefix(self._worlds)}/{_row_key(rank, point)}"

    def end(self) -> None:
        """Tell the other hosts that this one has done its part. Host 0, which has the store, waits for the others."""
        self._has_ended.set()
        others = [_left(node) for node in range(1, self.nnodes)] if self.node_rank == 0 else []
        with suppress(EngineError, UserError):  # the store is gone with host 0, or a host has failed
            self._store.set(_left(self.node_rank), "")
            while not self._store.has(others):
                self.check_others()
                time.sleep(_POLL_S)

    def check_others(self) -> None:
        """Raise EngineError or UserError if another host is gone, or has ended with an error.

        Asks the store every two seconds at most, because ranks measure meanwhile.
        """
        if self._is_alone:
            raise EngineError("the connection to host 0 is lost: see what it has printed")
        now_s = time.monotonic()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + _BEAT_S
        self._check_failure()
        for node in range(self.nnodes):
            signs = self._store.add(_signs_of(node), 0)
            if signs != self._signs[node]:
                self._signs[node], self._heard_s[node] = signs, now_s
            elif signs and now_s - self._heard_s[node] > _SILENCE_S and not self._store.has([_left(node)]):
                raise EngineError(f"host {node} is gone: it was stopped or killed, or its network was cut off")

    def leave(self, error: BaseException) -> None:
        """Tell the other hosts that this one ends with an error. The first error of all hosts counts."""
        self._has_ended.set()
        with suppress(EngineError):  # the store is gone with host 0
            code = error.code if isinstance(error, UserError) else None
            words = str(error) or type(error).__name__
            if not isinstance(error, Exception):  # a signal
                words = "it was interrupted"
            failure = {"words": f"host {self.node_rank} has ended: {words}", "code": code}
            self._store.set_first(_FAILED, json.dumps(failure))
            self._store.set(_left(self.node_rank), "")
            deadline_s = time.monotonic() + _LEAVE_S * (self.node_rank == 0)
            others = [_left(node) for node in range(1, self.nnodes)]
            while time.monotonic() < deadline_s and not self._store.has(others):
                time.sleep(_POLL_S)

    def _give_signs(self) -> None:
        """Show the other hosts that this one lives, until it ends. Runs in a thread."""
        try:
            while not self._has_ended.wait(_BEAT_S):
                self._signs_store.add(_signs_of(self.node_rank), 1)
        except EngineError:
            self._is_alone = True

    def _take_place(self) -> bytes:
        """Claim this host's node rank. Returns a nonce of host 0. Raises UserError if another host has the rank."""
        if self.node_rank == 0:
            self._store.set("nonce", secrets.token_hex(16))
        self._await({"nonce": "host 0"}, _JOIN_S, "did not answer", _SEE)
        nonce = self._store.get("nonce")
        if self._store.add(f"hosts with node rank {self.node_rank}", 1) > 1:
            raise UserError(
                f"node rank {self.node_rank} is already taken: give each host its own --node-rank. If a host was "
                "started again, start the others again too",
                "invalid_cluster",
            )
        return nonce

    def _gather(self, own: dict[str, Any], nonce: bytes) -> list[dict[str, Any]]:
        """Exchange what hosts say of themselves, and check it. Returns it by node rank."""
        self._store.set(f"host {self.node_rank}", json.dumps(own | {"proof": self._proof(nonce, self.node_rank)}))
        everyone = [f"host {node}" for node in range(self.nnodes)]
        if self.node_rank == 0:
            same = "start the same command on every host, each with its own --node-rank"
            self._await({key: key for key in everyone}, _JOIN_S, "did not join", same)
            found = [json.loads(self._store.get(key)) for key in everyone]
            reasons = (self._objection(node, found, nonce) for node in range(1, self.nnodes))
            verdict = next(filter(None, reasons), "")
            self._store.set("verdict", verdict)
        else:
            self._await({"verdict": "host 0"}, _JOIN_S, "did not admit this host", _SEE)
            verdict = self._store.get("verdict").decode()
        if verdict:
            raise UserError(verdict, "invalid_cluster")
        return [json.loads(self._store.get(key)) for key in everyone]

    def _objection(self, node: int, found: list[dict[str, Any]], nonce: bytes) -> str | None:
        own, other = found[0], found[node]
        if not hmac.compare_digest(other["proof"], self._proof(nonce, node)):
            return f"host {node} has another cluster secret than host 0: give the same secret on every host"
        for name, words, remedy in (
            ("version", "other versions", "install the same versions on all hosts"),
            ("kernels", "native kernels for another instruction set", SAME_PROCESSORS),
            ("nnodes", "another --nnodes", "give the same number on all hosts"),
            ("command", "another command", "start the same command on all hosts"),
        ):
            if own[name] != other[name]:
                return f"host {node} has {words} ({other[name]}) than host 0 ({own[name]}): {remedy}"
        return None

    def _proof(self, nonce: bytes, node: int) -> str:
        keys = self._membership.keys
        secret = b"" if keys is None else keys.followers.secret
        return hmac.digest(secret, nonce + str(node).encode(), "sha256").hex()

    def _await(self, keys: Mapping[str, str], limit_s: float, late: str, remedy: str) -> None:
        """Wait until all keys are in the store, in slices, so that failures of other hosts and signals are noticed.

        Args:
            keys: who sets each key, such as `host 1`.
            limit_s: time limit in seconds.
            late: what these hosts did not do, for the error.
            remedy: what to do about it, for the error.
        """
        deadline_s = time.monotonic() + limit_s
        while not self._store.has(list(keys)):
            try:
                self._check_failure()
                self.check_others()
            except (EngineError, UserError):
                if self._store.has(list(keys)):  # a host sets its last keys before it ends
                    return
                raise
            if time.monotonic() > deadline_s:
                missing = dict.fromkeys(who for key, who in keys.items() if not self._store.has([key]))
                raise UserError(f"{', '.join(missing)} {late} within {limit_s:.0f} s: {remedy}", "invalid_cluster")
            time.sleep(_POLL_S)

    def _check_failure(self) -> None:
        if self._store.has([_FAILED]):
            raise self._failure()

    def _failure(self) -> EngineError | UserError:
        """Return the error with which another host has ended."""
        failure = json.loads(self._store.get(_FAILED))
        if failure["code"] is None:
            return EngineError(failure["words"])
        return UserError(failure["words"], failure["code"])


class _WorldMeeting(msgspec.Struct, frozen=True):
    """Where the ranks of one measurement meet, as the ranks of one host see it."""

    place: Meeting
    world: int  # number of the measurement
    is_first: bool  # whether this is host 0

    @property
    def store(self) -> dist.Store:
        return dist.PrefixStore(_prefix(self.world), client(self.place.address, self.place.port, _JOIN_S))


def meet(world_size: int, rank: int, directory: Path) -> None:
    """Make the world of ranks on several hosts, which `MeasuringHosts.begin_world` has prepared."""
    meeting = _read(directory)
    assert meeting is not None
    os.environ["GLOO_SOCKET_IFNAME"] = meeting.place.interface
    dist.init_process_group("gloo", store=meeting.store, rank=rank, world_size=world_size, timeout=_RANKS_WAIT)


def reporter(rank: int, directory: Path) -> Callable[[str], None]:
    """Return a function that takes the rows of a rank as JSON, and sends them to host 0 if the rank is on another."""
    meeting = _read(directory)
    if meeting is None or meeting.is_first:
        return lambda row: None
    store, points = meeting.store, iter(range(1 << 62))
    return lambda row: store.set(_row_key(rank, next(points)), row)


def _left(node: int) -> str:
    return f"host {node} has ended"


def _signs_of(node: int) -> str:
    return f"signs of host {node}"


def _read(directory: Path) -> _WorldMeeting | None:
    file = directory / _MEETING
    return msgspec.json.decode(file.read_bytes(), type=_WorldMeeting) if file.exists() else None


def _prefix(world: int) -> str:
    return f"measurement {world}"


def _row_key(rank: int, point: int) -> str:
    return f"row {point} of rank {rank}"
