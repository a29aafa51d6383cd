"""Creates a network link with a limited rate between two ranks.

Each rank has its own network namespace. A pair of virtual devices joins the namespaces, and `tc` limits the rate.

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
from longhelix.values import real

RANKS = (0, 1)
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
    """This rank's end of a link."""

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


def join(rank: int, directory: Path) -> RankLink:
    """Leave the host's network, and connect to the other rank through a link without a rate limit.

    Both ranks in RANKS must call this function before they open other connections. Threads that already exist stay in
    the network of the host.

    Args:
        rank: this rank, one of RANKS.
        directory: a directory that both ranks can access.

    Raises:
        UserError: the system refuses to create the namespace or the link.
    """
    try:
        _leave_network()
    except OSError as error:
        raise UserError(f"this process cannot create a network namespace ({error.strerror}): run as root") from error
    store = dist.FileStore(str(directory / "link"), len(RANKS))
    store.set(str(rank), str(os.getpid()))
    if rank == 0:
        other = store.get("1").decode()
        _command(f"ip link add {_DEVICE} type veth peer name {_DEVICE} netns {other}")
        store.set("made", "")
    store.wait(["made"])
    _command(f"ip address add 10.213.0.{rank + 1}/24 dev {_DEVICE}")
    for device in ("lo", _DEVICE):
        _command(f"ip link set {device} up")
    return RankLink(_DEVICE)


def _leave_network() -> None:
    """Move this thread and all threads that it starts to a new network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _command(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise UserError(
            f"{command} failed ({done.stderr.strip()}): run as root, on a kernel with network namespaces and tc"
        )
