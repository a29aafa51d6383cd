"""Creates a network link with a limited rate between two groups of ranks, which are then like two hosts.

Each group has its own network namespace. A pair of virtual devices joins the namespaces, and `tc` limits the rate.

The link needs Linux, root, and the programs ip and tc (package iproute2). The namespaces have no names. The kernel
therefore removes the namespaces and the link when the ranks exit, even if the ranks crash.
"""

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from longhelix.errors import UserError
from longhelix.spec.hosts import Hosts
from longhelix.values import real

RANKS = (0, 1)
_ONE_EACH = Hosts.in_order([1, 1])
LEAST_MBIT, MOST_MBIT = 0.001, 1e6
# Maximum duration of a burst after a pause. Shorter bursts would need faster timers at high rates. TCP must send pieces
# that are smaller than a burst, because tbf splits larger pieces into packets, and splitting takes longer than sending.
BURST_S = 2e-4
_LEAST_BURST_BYTES = 4096
_MOST_PIECE_BYTES = 65536
_DEVICE = "link0"
_QUEUE = "64mb"  # larger than the data that TCP has in flight, so that no packet is dropped
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class RankLink:
    """The end of a link at this rank's host."""

    device: str  # name of the network device in the namespace of this process

    def limit(self, rate_mbit: float) -> None:
        """Limit the rate at which this end sends. The other end has a separate limit. Raises UserError if tc fails."""
        burst = burst_bytes(rate_mbit)
        piece_bytes = min(burst * 3 // 4, _MOST_PIECE_BYTES)  # leaves room for headers and late timers
        _command(f"tc qdisc replace dev {self.device} root tbf rate {rate_mbit:f}mbit burst {burst} limit {_QUEUE}")
        _command(f"ip link set {self.device} gso_max_size {piece_bytes}")
        _command("ip route flush cache")  # open connections then look up the route again and use the new size

    def sent_bytes(self) -> int:
        """Number of bytes that the device has sent, including headers and TCP retransmissions.

        For loopback, the number includes the bytes of all programs on this host.
        """
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        sent = {
            name.strip(): int(numbers.split()[8]) for name, _, numbers in (line.partition(":") for line in lines[2:])
        }
        return sent[self.device]


LOOPBACK = RankLink("lo")


def checked_rate_mbit(rate_mbit: float) -> float:
    """Round a rate to whole bits per second, as tc does. Raises UserError if the rate is out of range."""
    allowed = f"a number from {LEAST_MBIT:g} to {MOST_MBIT:,.0f}"
    return round(real("rates_mbit", rate_mbit, lambda number: LEAST_MBIT <= number <= MOST_MBIT, allowed), 6)


def link_label(rate_mbit: float | None) -> str:
    """Label of a link in tables. Two rates have different labels if tc distinguishes them."""
    return "loopback" if rate_mbit is None else f"{rate_mbit:,.15g} Mbit/s"


def burst_bytes(rate_mbit: float) -> int:
    """Size of a burst after a pause: the bytes that a link of this rate sends in BURST_S, but at least 4 KB."""
    return max(round(rate_mbit * 1e6 / 8 * BURST_S), _LEAST_BURST_BYTES)


def missing() -> str | None:
    """Reason why this process cannot create a link, as a clause. None if this process can create a link."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the program {program} is missing: install iproute2"
    if os.geteuid():
        return "network namespaces need root: run this as root"
    tried = f"ip link add {_DEVICE} type veth && tc qdisc add dev {_DEVICE} root tbf rate 1mbit burst 4kb limit 1mb"
    try:
        done = subprocess.run(["sh", "-c", tried], preexec_fn=_leave_network, capture_output=True, text=True)
    except subprocess.SubprocessError:
        return "this user cannot create network namespaces"
    return None if done.returncode == 0 else f"this kernel or user cannot create links ({done.stderr.strip()})"


def join(rank: int, directory: Path, hosts: Hosts = _ONE_EACH) -> RankLink:
    """Leave the machine's network, and connect to the ranks of the other host through a link without a rate limit.

    All ranks must call this function before they open other connections. Threads that already exist stay in the network
    of the machine.

    Args:
        rank: this rank.
        directory: a directory that all ranks can access.
        hosts: the ranks of the two hosts that the link joins.

    Raises:
        UserError: the system refuses to create the namespace or the link.
    """
    node = hosts.node_of(rank)
    first = hosts.ranks[node][0]
    store = dist.FileStore(str(directory / "link"), hosts.world_size)
    if rank != first:
        store.wait([f"up{node}"])
        _enter_network(int(store.get(str(node))))
        return RankLink(_DEVICE)
    try:
        _leave_network()
    except OSError as error:
        raise UserError(f"this process cannot create a network namespace ({error.strerror}): run as root") from error
    store.set(str(node), str(os.getpid()))
    if node == 0:
        other = store.get("1").decode()
        _command(f"ip link add {_DEVICE} type veth peer name {_DEVICE} netns {other}")
        store.set("made", "")
    store.wait(["made"])
    _command(f"ip address add 10.213.0.{node + 1}/24 dev {_DEVICE}")
    for device in ("lo", _DEVICE):
        _command(f"ip link set {device} up")
    store.set(f"up{node}", "")
    return RankLink(_DEVICE)


def _leave_network() -> None:
    """Move this thread and all threads that it starts to a new network namespace."""
    _checked(_libc().unshare(_CLONE_NEWNET))


def _enter_network(process: int) -> None:
    """Move this thread and all threads that it starts to the network namespace of a process."""
    with open(f"/proc/{process}/ns/net") as namespace:
        _checked(_libc().setns(namespace.fileno(), _CLONE_NEWNET))


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(status: int) -> None:
    if status:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _command(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"{command} failed ({done.stderr.strip()}): run as root, on a kernel with network namespaces and tc"
        )
