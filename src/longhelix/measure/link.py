"""The link between two ranks of a measurement: a network namespace for each of them, two virtual devices that join
them, and `tc`, which slows both down.

Needs Linux, root, and the programs ip and tc (package iproute2). The namespaces have no names: they are gone, and the
link with them, as soon as the ranks are, however these end.
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
# After a pause, what the rate carries in this time passes at once: with less, timers are too late for high rates. TCP
# hands over smaller pieces, for tbf cuts what is larger than its burst to packets, which costs cores more than sending.
BURST_S = 2e-4
_LEAST_BURST_BYTES = 4096
_MOST_PIECE_BYTES = 65536
_DEVICE = "link0"
_QUEUE = "64mb"  # more than TCP has on its way: nothing is dropped
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Link:
    """This rank's end. device: its name in the namespace of this process."""

    device: str

    def limit(self, rate_mbit: float) -> None:
        """From now on, send at most so much; each end limits its own direction. Raises UserError where tc cannot."""
        burst = burst_bytes(rate_mbit)
        piece_bytes = min(burst * 3 // 4, _MOST_PIECE_BYTES)  # the rest: for headers, and for timers that are late
        _command(f"tc qdisc replace dev {self.device} root tbf rate {rate_mbit:f}mbit burst {burst} limit {_QUEUE}")
        _command(f"ip link set {self.device} gso_max_size {piece_bytes}")
        _command("ip route flush cache")  # connections learn of it when they look up their route anew

    def sent_bytes(self) -> int:
        """What the device has sent, headers and what TCP repeats included: of loopback, what all of this host have."""
        lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
        sent = {
            name.strip(): int(numbers.split()[8]) for name, _, numbers in (line.partition(":") for line in lines[2:])
        }
        return sent[self.device]


LOOPBACK = Link("lo")


def checked_rate_mbit(rate_mbit: float) -> float:
    """A rate as tc takes it, which is to the bit a second. Raises UserError for one out of reach."""
    allowed = f"a number from {LEAST_MBIT:g} to {MOST_MBIT:,.0f}"
    return round(real("rates_mbit", rate_mbit, lambda number: LEAST_MBIT <= number <= MOST_MBIT, allowed), 6)


def burst_bytes(rate_mbit: float) -> int:
    """What a link of this rate lets pass at once after a pause: what it carries in BURST_S, or 4 KB."""
    return max(round(rate_mbit * 1e6 / 8 * BURST_S), _LEAST_BURST_BYTES)


def missing() -> str | None:
    """Why this process's ranks cannot be joined by such a link, in one sentence; None if they can."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the program {program} is missing: install iproute2"
    if os.geteuid():
        return "network namespaces need root: run this as root"
    tried = f"ip link add {_DEVICE} type veth && tc qdisc add dev {_DEVICE} root tbf rate 1mbit burst 4kb limit 1mb"
    try:
        done = subprocess.run(["sh", "-c", tried], preexec_fn=_leave_network, capture_output=True, text=True)
    except subprocess.SubprocessError:
        return "this user may make no network namespaces"
    return None if done.returncode == 0 else f"this kernel or user cannot make links ({done.stderr.strip()})"


def join(rank: int, directory: Path) -> Link:
    """Leave the host's network, and return once this rank's end of a link to the other one is up, at no limited rate.

    Both of RANKS call this, before anything that connects; threads that run by then stay in the host's network.
    `directory`: where they meet. Raises UserError where the system refuses it.
    """
    try:
        _leave_network()
    except OSError as error:
        raise UserError(f"this process cannot have a network namespace: {error.strerror}") from error
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
    return Link(_DEVICE)


def _leave_network() -> None:
    """Move this thread, and those that it will start, to a new network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _command(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{command} failed ({done.stderr.strip()}): this kernel or user cannot do it")
