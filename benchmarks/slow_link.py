"""Two network namespaces of this host, joined by a link that `tc` slows down, and a rank in each of them.

Needs Linux, root, and the programs ip and tc (package iproute2).
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

RANKS = (0, 1)
DEVICE = "slow"
QUEUE = "2s"
TIMEOUT_S = 900


def missing() -> str | None:
    """What this host lacks, in one sentence."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"the program {program} is missing: install iproute2"
    if os.geteuid():
        return "network namespaces need root: run this as root"
    return None


@contextmanager
def namespaces(rate_mbit: float, burst: str) -> Iterator[list[str]]:
    """Two network namespaces with one link between them, gone afterwards. burst: what it lets through at once."""
    names = [f"slow-{os.getpid()}-{rank}" for rank in RANKS]
    with ExitStack() as stack:
        for name in names:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)  # and with it its end of the link
        _ip("link", "add", DEVICE, "netns", names[0], "type", "veth", "peer", "name", DEVICE, "netns", names[1])
        for rank, name in zip(RANKS, names, strict=True):
            _ip("-n", name, "address", "add", f"10.213.0.{rank + 1}/24", "dev", DEVICE)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", DEVICE, "up")
            limits = ["rate", f"{rate_mbit}mbit", "burst", burst, "latency", QUEUE]
            _command("tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root", "tbf", *limits)
        yield names


def run_ranks(names: Sequence[str], arguments: Sequence[str]) -> None:
    """Both ranks: this program with `arguments` and --rank, each in its namespace; raises SystemExit if one fails."""
    _run([["ip", "netns", "exec", name] for name in names], arguments, os.environ | {"GLOO_SOCKET_IFNAME": DEVICE})


def run_ranks_on_host(arguments: Sequence[str]) -> None:
    """As `run_ranks`, both side by side in the namespace of this process."""
    _run([[] for _ in RANKS], arguments, os.environ)


def _run(prefixes: Sequence[list[str]], arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    processes = [
        subprocess.Popen([*prefix, sys.executable, sys.argv[0], *arguments, "--rank", str(rank)], env=environment)
        for rank, prefix in zip(RANKS, prefixes, strict=True)
    ]
    try:
        statuses = [process.wait(TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(statuses):
        raise SystemExit(f"error: the ranks ended with {statuses}")


def _ip(*arguments: str) -> None:
    _command("ip", *arguments)


def _command(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)} failed ({done.stderr.strip()}): this kernel or user cannot do it")
