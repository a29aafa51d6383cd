"""Hosts that measure together. They run the same command at the same time, and meet through a store on host 0."""

import hmac
import json
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from longhelix.compute.machine import host
from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.meeting import Meeting
from longhelix.engine.hosts.launcher import with_launcher
from longhelix.engine.hosts.membership import Membership, versions
from longhelix.engine.options import EngineOptions
from longhelix.errors import UserError
from longhelix.spec.hosts import Hosts
from longhelix.spec.layout import Layout, split

_JOIN = timedelta(seconds=600)  # longest time to wait for other hosts, which a scheduler may start minutes later
_ANSWER = timedelta(seconds=30)  # longest time to wait for the answer of host 0
_WAIT = timedelta(seconds=3600)  # longest time to wait for a point of another host
_MEETING = "meeting.json"


class MeasuringHosts:
    """The hosts that run a measuring command, as one of them sees them.

    Attributes:
        node_rank: number of this host.
        cores: number of cores of each host, by node rank.
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
        self.node_rank, self._membership = membership.node_rank, membership
        place = f"{membership.first_address}:{membership.port}"
        self._worlds = self._decisions = 0
        if self.node_rank == 0:
            self._store = _host_store(membership.first_address, membership.port)
            tell(f"waiting for the other hosts at {place}")
        else:
            tell(f"waiting for host 0 at {place}")
            self._store = _join_store(membership.first_address, membership.port)
        own = {"version": versions(), "command": " ".join(command), "cores": host.cores()}
        found = self._gather(own)
        self.cores = [each["cores"] for each in found]

    @classmethod
    def of(
        cls, settings: dict[str, Any], command: Sequence[str], tell: Callable[[str], None]
    ) -> "MeasuringHosts | None":
        """Meet the hosts that the engine options in `settings` name. Returns None for a command on one host."""
        options = with_launcher(EngineOptions(**settings))
        layout = Layout(kvp=options.nnodes or 1)  # each host has at least one rank
        membership = Membership.of(options, layout)
        return None if membership is None else cls(membership, command, tell)

    @property
    def nnodes(self) -> int:
        return self._membership.nnodes

    def places(self, size: int) -> Hosts:
        """Place ranks on the hosts. Raises UserError if there are fewer ranks than hosts."""
        if size < self.nnodes:
            raise UserError(
                f"a measured layout has {size} ranks, but there are {self.nnodes} hosts: choose a layout with at least "
                "one rank per host",
                "invalid_cluster",
            )
        return Hosts.in_order([len(ranks) for ranks in split(size, self.nnodes)])

    def placed(self, config: EngineConfig) -> EngineConfig:
        """Return a configuration with its ranks on these hosts, and their cores divided among their ranks."""
        hosts = self.places(config.layout.world_size)
        threads = [max(cores // len(ranks), 1) for cores, ranks in zip(self.cores, hosts.ranks, strict=True)]
        return replace(config, hosts=hosts, threads_per_rank=tuple(threads))

    def begin_world(self, directory: Path, is_shared: bool) -> None:
        """Wait until all hosts begin their next measurement, and tell the ranks of this host where to meet.

        Args:
            directory: directory of the ranks of this host.
            is_shared: whether the ranks of all hosts measure together, or each host by itself.
        """
        self._worlds += 1
        self._store.set(f"world {self._worlds}, host {self.node_rank}", "")
        self._store.wait([f"world {self._worlds}, host {node}" for node in range(self.nnodes)], _WAIT)
        if not is_shared:
            return
        place = self._membership
        meeting = _WorldMeeting(
            Meeting(place.first_address, place.port, place.interface), self._worlds, self.node_rank == 0
        )
        (directory / _MEETING).write_bytes(msgspec.json.encode(meeting))

    def decided(self, values: Any) -> Any:
        """Return the values of host 0, after JSON, on all hosts. What changes collectives is decided once for all."""
        self._decisions += 1
        key = f"decision {self._decisions}"
        if self.node_rank == 0:
            self._store.set(key, json.dumps(values))
        self._store.wait([key], _WAIT)
        return json.loads(self._store.get(key))

    def row(self, rank: int, point: int) -> dict[str, Any]:
        """Return what a rank of another host has measured in the current world. Waits for it. Host 0 only."""
        key = f"{_prefix(self._worlds)}{_row_key(rank, point)}"
        self._store.wait([key], _WAIT)
        return json.loads(self._store.get(key))

    def _gather(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Exchange what hosts say, and check it. Returns it by node rank."""
        if self.node_rank == 0:
            self._store.set("nonce", secrets.token_hex(16))
        nonce = self._store.get("nonce")
        own["proof"] = self._proof(nonce, self.node_rank)
        self._store.set(f"host {self.node_rank}", json.dumps(own))
        try:
            if self.node_rank:
                self._store.wait(["verdict"], _JOIN)
            else:
                self._store.wait([f"host {node}" for node in range(self.nnodes)], _JOIN)
        except RuntimeError as error:
            raise UserError(
                f"not all {self.nnodes} hosts started within {_JOIN.seconds} s: start the same command on every host, "
                "each with its own --node-rank",
                "invalid_cluster",
            ) from error
        found = [json.loads(self._store.get(f"host {node}")) for node in range(self.nnodes)]
        if self.node_rank == 0:
            verdict = next(filter(None, (self._objection(node, found) for node in range(1, self.nnodes))), "")
            self._store.set("verdict", verdict)
            if verdict:
                self._store.wait([f"heard {node}" for node in range(1, self.nnodes)], _ANSWER)
        verdict = self._store.get("verdict").decode()
        if verdict:
            self._store.set(f"heard {self.node_rank}", "")
            raise UserError(verdict, "invalid_cluster")
        return found

    def _objection(self, node: int, found: list[dict[str, Any]]) -> str | None:
        own, other = found[0], found[node]
        if not hmac.compare_digest(other["proof"], self._proof(self._store.get("nonce"), node)):
            return f"host {node} has another cluster secret than host 0: give the same secret on every host"
        for name, remedy in (
            ("version", "install the same versions on all hosts"),
            ("command", "start the same command on all hosts"),
        ):
            if own[name] != other[name]:
                return f"host {node} has another {name} ({other[name]}) than host 0 ({own[name]}): {remedy}"
        return None

    def _proof(self, nonce: bytes, node: int) -> str:
        keys = self._membership.keys
        secret = b"" if keys is None else keys.followers.secret
        return hmac.digest(secret, nonce + str(node).encode(), "sha256").hex()


class _WorldMeeting(msgspec.Struct, frozen=True):
    """Where the ranks of one measurement meet, as the ranks of one host see it."""

    place: Meeting
    world: int  # number of the measurement
    is_first: bool  # whether this is host 0

    @property
    def store(self) -> dist.Store:
        opened = dist.TCPStore(self.place.address, self.place.port, is_master=False, wait_for_workers=False)
        return dist.PrefixStore(_prefix(self.world).rstrip("/"), opened)


def meet(world_size: int, rank: int, directory: Path) -> None:
    """Make the world of ranks on several hosts, which `MeasuringHosts.begin_world` has prepared."""
    meeting = _read(directory)
    assert meeting is not None
    os.environ["GLOO_SOCKET_IFNAME"] = meeting.place.interface
    dist.init_process_group("gloo", store=meeting.store, rank=rank, world_size=world_size)


def reporter(rank: int, directory: Path) -> Callable[[str], None]:
    """Return a function that takes the rows of a rank as JSON, and sends them to host 0 if the rank is on another."""
    meeting = _read(directory)
    if meeting is None or meeting.is_first:
        return lambda row: None
    store, points = meeting.store, iter(range(1 << 62))
    return lambda row: store.set(_row_key(rank, next(points)), row)


def _read(directory: Path) -> _WorldMeeting | None:
    file = directory / _MEETING
    return msgspec.json.decode(file.read_bytes(), type=_WorldMeeting) if file.exists() else None


def _prefix(world: int) -> str:
    return f"measurement {world}/"


def _row_key(rank: int, point: int) -> str:
    return f"row {point} of rank {rank}"


def _host_store(address: str, port: int) -> dist.Store:
    try:
        opened = socket.create_server((address, port))
    except OSError as error:
        raise UserError(
            f"port {port} of {address} cannot be used ({error.strerror}): set --master-port to another port",
            "invalid_cluster",
        ) from error
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=opened.detach())


def _join_store(address: str, port: int) -> dist.Store:
    try:
        return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=_JOIN)
    except RuntimeError as error:
        raise UserError(
            f"host 0 did not answer at {address}:{port} within {_JOIN.seconds} s: start it, or correct --master-addr "
            "and --master-port",
            "invalid_cluster",
        ) from error
