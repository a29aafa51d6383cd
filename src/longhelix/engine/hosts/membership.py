"""This host's place in a cluster of hosts, from the settings of the engine."""

import hashlib
import importlib.metadata
import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from longhelix.compute.machine import host
from longhelix.compute.machine.devices import free_gpu_bytes, gpu_capabilities, native_instruction_set
from longhelix.compute.models.gguf_file import part_paths
from longhelix.engine.hosts import network
from longhelix.engine.hosts.launcher import with_launcher
from longhelix.engine.hosts.messages import Facts
from longhelix.engine.hosts.secret import Keys, keys_of, read_secret
from longhelix.engine.options import EngineOptions
from longhelix.engine.workers import torchrun
from longhelix.errors import UserError
from longhelix.spec.hosts import Hosts
from longhelix.spec.layout import Layout, split

# Settings that may differ between hosts. Only host 0 serves and publishes events.
_OWN = (
    "node_rank",
    "master_addr",
    "interface",
    "cluster_secret_file",
    "allow_without_secret",
    "allow_without_key",
    "kv_events_endpoint",
    "kv_events_replay_endpoint",
    "kv_events_topic",
    "trace",
)
_BLOCKS, _BLOCK_BYTES = 32, 2**16  # how much of each file is compared
SAME_PROCESSORS = "use hosts whose processors support the same instruction sets"


@dataclass(frozen=True)
class Membership:
    """One host's place among `nnodes` hosts.

    Attributes:
        nnodes: number of hosts.
        node_rank: number of this host. Host 0 runs the engine.
        master_addr: name or address of host 0, as the user gave it.
        first_address: IPv4 address of host 0.
        port: port on which host 0 listens for the others.
        address: IPv4 address of this host, through which its ranks reach the others.
        interface: the interface with this address.
        keys: keys of the cluster; None without a secret.
        hosts: which host runs each rank.
        is_launched: whether a launcher has started the hosts, and starts all of them again if one fails.
    """

    nnodes: int
    node_rank: int
    master_addr: str
    first_address: str
    port: int
    address: str
    interface: str
    keys: Keys | None
    hosts: Hosts
    is_launched: bool

    @classmethod
    def of(cls, options: EngineOptions, layout: Layout) -> "Membership | None":
        """Read the place from the settings. Returns None for an engine on one host.

        Raises:
            UserError: settings are missing or do not fit together, or this host lacks the interface or a route.
        """
        given, options = options, with_launcher(options)
        if options.nnodes in (None, 1):
            useless = [name for name in ("node_rank", "master_addr", "rank_mapping") if getattr(options, name)]
            if useless:
                raise UserError(
                    f"{useless[0]} is set, but nnodes is not: set nnodes to the number of hosts", "invalid_cluster"
                )
            return None
        if options.node_rank is None or options.master_addr is None:
            missing = "node_rank" if options.node_rank is None else "master_addr"
            raise UserError(
                f"nnodes is {options.nnodes}, but {missing} is not set: set node_rank to the number of this host, from "
                "0, and master_addr to the address of host 0",
                "invalid_cluster",
            )
        if options.node_rank >= options.nnodes:
            raise UserError(
                f"node_rank is {options.node_rank}, but nnodes is {options.nnodes}: number the hosts from 0 to "
                f"{options.nnodes - 1}",
                "invalid_cluster",
            )
        hosts = _hosts(options, layout)
        first_address = network.resolved(options.master_addr)
        if options.node_rank == 0 and options.interface is not None:
            address = network.address_of(options.interface)
            if first_address != address and not network.is_loopback(first_address):
                raise UserError(
                    f"master_addr is {first_address}, but the interface {options.interface} of host 0 has the address "
                    f"{address}: set master_addr to {address} on all hosts",
                    "invalid_cluster",
                )
            first_address = address
        if network.is_loopback(first_address) and options.master_addr not in ("localhost", first_address):
            raise UserError(
                f"{options.master_addr} is {first_address} on this host, which other hosts cannot reach: set "
                "master_addr to an address of host 0 in the network of the hosts",
                "invalid_cluster",
            )
        if options.interface is not None:
            address, interface = network.address_of(options.interface), options.interface
        else:
            address = first_address if options.node_rank == 0 else network.address_towards(first_address)
            interface = network.interface_of(address)
        secret = read_secret(options.cluster_secret_file)
        if secret is None and not network.is_loopback(first_address) and not options.allow_without_secret:
            raise UserError(
                f"the hosts connect through {first_address}, but there is no secret that protects them: give the same "
                "--cluster-secret-file on every host, or set --allow-without-secret if the network is trusted",
                "invalid_cluster",
            )
        return cls(
            nnodes=options.nnodes,
            node_rank=options.node_rank,
            master_addr=options.master_addr,
            first_address=first_address,
            port=options.master_port,
            address=address,
            interface=interface,
            keys=None if secret is None else keys_of(secret),
            hosts=hosts,
            is_launched=given.nnodes is None,
        )

    def looked_up(self) -> "Membership":
        """Return this place with the address that host 0 has now. For followers.

        Host 0 gets another address if a launcher of containers starts it again. Its name may be unknown for a while.
        """
        with suppress(UserError):
            return replace(self, first_address=network.resolved(self.master_addr))
        return self

    def facts(self, probe_port: int) -> Facts:
        """Return what this host has. `probe_port`: where it listens for the check of connections."""
        return Facts(
            address=self.address,
            probe_port=probe_port,
            cores=host.cores(),
            free_bytes=host.available_bytes(),
            gpu_bytes=free_gpu_bytes(),
            gpu_capabilities=gpu_capabilities(),
        )


def _hosts(options: EngineOptions, layout: Layout) -> Hosts:
    if options.rank_mapping is None:
        if layout.world_size < options.nnodes:
            raise UserError(
                f"the layout has {layout.world_size} ranks, but nnodes is {options.nnodes}: choose a layout with at "
                "least one rank per host",
                "invalid_cluster",
            )
        hosts = Hosts.in_order([len(ranks) for ranks in split(layout.world_size, options.nnodes)])
    else:
        hosts = Hosts.parse(options.rank_mapping)
    launched = torchrun.ranks_of_host()
    if launched is not None and launched != hosts.ranks[options.node_rank]:
        raise UserError(
            f"torchrun started ranks {launched} on this host, but longhelix places ranks "
            f"{hosts.ranks[options.node_rank]} there: leave out --rank-mapping, and start as many ranks on each host",
            "invalid_cluster",
        )
    if len(hosts.ranks) != options.nnodes or hosts.world_size != layout.world_size:
        raise UserError(
            f"the rank mapping {options.rank_mapping} has {hosts.world_size} ranks on {len(hosts.ranks)} hosts, but "
            f"the layout has {layout.world_size} ranks and nnodes is {options.nnodes}: correct --rank-mapping",
            "invalid_cluster",
        )
    return hosts


def versions() -> str:
    """Return the versions that must be the same on all hosts."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("longhelix", "torch"))


def kernels() -> str:
    """Return the instruction set of the native kernels, which must be the same on all hosts, because results differ."""
    return native_instruction_set() or "none"


def common_settings(options: EngineOptions) -> str:
    """Return the settings that must be the same on all hosts, in words."""
    found = {name: value for name, value in vars(options).items() if name not in _OWN}
    default = EngineOptions()
    return ", ".join(f"{name}={value}" for name, value in sorted(found.items()) if value != getattr(default, name))


def model_fingerprint(path: Path) -> str:
    """Return a digest of a model's files: their names, their sizes, and blocks that are spread over them evenly."""
    digest = hashlib.sha256()
    files = sorted(each for each in path.iterdir() if each.is_file()) if path.is_dir() else part_paths(path)
    for file in files:
        if file.suffix in (".json", ".safetensors", ".gguf", ".jinja"):
            size = os.stat(file).st_size
            with open(file, "rb") as opened:
                digest.update(f"{file.name if path.is_dir() else ''} {size} ".encode())
                for block in range(_BLOCKS):
                    opened.seek(max(size - _BLOCK_BYTES, 0) * block // (_BLOCKS - 1))
                    digest.update(opened.read(_BLOCK_BYTES))
    return digest.hexdigest()[:16]
