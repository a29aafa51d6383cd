"""Several hosts on one machine: network namespaces on a bridge, each with processes and temporary files of its own."""

import ctypes
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from glob import glob
from pathlib import Path

import psutil
import pytest

_NUMBERS = itertools.count()
_CLONE_NEWNET = 0x40000000
# The first process of a host. It starts the program, and ends with the program's status when all others have ended.
_FIRST_PROCESS = """
import os, sys
program = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
while True:
    try:
        ended, status = os.wait()
    except ChildProcessError:
        sys.exit(result if result >= 0 else 128 - result)
    if ended == program:
        result = os.waitstatus_to_exitcode(status)
"""


class Network:
    """Hosts 0, 1, ... with the addresses 10.77.0.1, 10.77.0.2, ...

    Processes of different hosts share no memory, see no processes of each other, and have temporary folders and
    loopback interfaces of their own.
    """

    def __init__(self, size):
        if os.geteuid():
            pytest.skip("network namespaces need root")
        tag = f"lh{os.getpid() % 100_000}x{next(_NUMBERS)}"
        self._switch, self._hosts = f"{tag}s", [f"{tag}h{node}" for node in range(size)]
        self._folder = Path(tempfile.mkdtemp(prefix=tag))
        self.processes = []
        self._names = {"localhost": "127.0.0.1"}
        self._names_file = self._folder / "hosts"
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.close()
            pytest.skip(f"network namespaces do not work here: {error.stderr.strip()}")

    def _make(self):
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for node, host in enumerate(self._hosts):
            self.temporary(node).mkdir()
            _ip("netns", "add", host)
            _ip("-n", host, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{node}", "netns", self._switch)
            _ip("-n", self._switch, "link", "set", f"p{node}", "master", "bridge", "up")
            _ip("-n", host, "addr", "add", f"{self.address(node)}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-n", host, "link", "set", interface, "up")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()
        for namespace in (self._switch, *self._hosts):
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "del", namespace)
        shutil.rmtree(self._folder, ignore_errors=True)

    def address(self, node):
        return f"10.77.0.{node + 1}"

    def temporary(self, node):
        """The folder for temporary files of a host."""
        return self._folder / str(node)

    def name(self, name, node):
        """Give a name to a host, which another host may have had. Programs that start later look names up here."""
        self._names[name] = self.address(node)
        self._names_file.write_text("".join(f"{address} {name}\n" for name, address in self._names.items()))

    def start(self, node, arguments, folders=None, **settings):
        """Start Python on a host.

        The process that is returned ends when the program and all processes that it has started have ended. When it is
        killed, so are they.

        folders: by path, the folders that this program sees there.
        """
        new_processes = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        mounts = list((folders or {}).items())
        if self._names_file.exists():
            mounts.append(("/etc/hosts", self._names_file))
        mount = [f"mount --bind {shlex.quote(str(own))} {shlex.quote(str(path))}" for path, own in mounts]
        shell = ["sh", "-c", " && ".join([*mount, 'exec "$@"']), "sh"]
        first_process = [sys.executable, "-I", "-S", "-c", _FIRST_PROCESS, sys.executable]
        command = ["ip", "netns", "exec", self._hosts[node], *new_processes, *shell, *first_process, *arguments]
        settings = {"stdin": subprocess.DEVNULL, "text": True, "env": os.environ} | settings
        settings["env"] = settings["env"] | {"TMPDIR": str(self.temporary(node))}
        process = subprocess.Popen(command, **settings)
        self.processes.append(process)
        return process

    def cut(self, node):
        """Take a host off the network."""
        _ip("-n", self._switch, "link", "set", f"p{node}", "down")

    def join(self, node):
        """Bring it back."""
        _ip("-n", self._switch, "link", "set", f"p{node}", "up")

    def hide(self, node, other):
        """Lose all that a host sends to another one."""
        self.run(node, "ip", "neigh", "replace", self.address(other), "lladdr", "02:00:00:00:00:01", "dev", "eth0")

    def slow(self, node, rate="1mbit"):
        """Limit the rate at which a host sends and receives."""
        limit = ["root", "tbf", "rate", rate, "burst", "4kb", "limit", "1mb"]
        for namespace, device in ((self._hosts[node], "eth0"), (self._switch, f"p{node}")):
            _tc(namespace, "qdisc", "replace", "dev", device, *limit)

    def lose(self, node, one_of=100):
        """Drop packets that arrive at a host at random, one of `one_of` on average."""
        # BPF: A = random, A %= one_of; if A == 0, return 2 (drop), else return -1 (go on).
        instructions = [
            (0x20, 0, 0, 0xFFFFF038),
            (0x94, 0, 0, one_of),
            (0x15, 0, 1, 0),
            (6, 0, 0, 2),
            (6, 0, 0, 2**32 - 1),
        ]
        code = ",".join(" ".join(map(str, each)) for each in instructions)
        _tc(self._hosts[node], "qdisc", "add", "dev", "eth0", "ingress")
        _tc(
            self._hosts[node], "filter", "add", "dev", "eth0", "ingress",
            "bpf", "direct-action", "bytecode", f"{len(instructions)},{code}",
        )  # fmt: skip

    def held_up(self, node):
        """Numbers of packets that a host could not send or receive at once, and that were dropped on arrival."""
        found = {each["kind"]: each for each in json.loads(self.run(node, "tc", "-s", "-j", "qdisc"))}
        return found.get("tbf", {}).get("overlimits", 0), found.get("ingress", {}).get("drops", 0)

    def run(self, node, *command):
        """Run a command in a host's network."""
        return _output("ip", "netns", "exec", self._hosts[node], *command)

    def inside(self, node, function, *arguments):
        """Call a function in a thread whose sockets belong to a host."""
        found = []

        def call():
            with open(f"/run/netns/{self._hosts[node]}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            found.append(function(*arguments))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return found[0]

    def left_over(self):
        """Processes of hosts that run, temporary files, and segments of shared memory."""
        processes = [f"process {pid}" for host in self._hosts for pid in _output("ip", "netns", "pids", host).split()]
        files = [str(file) for node in range(len(self._hosts)) for file in self.temporary(node).iterdir()]
        return [*processes, *files, *glob("/dev/shm/longhelix*")]


def program(started):
    """The program that `Network.start` has started."""
    [first] = psutil.Process(started.pid).children()
    [found] = first.children()
    return found


def all_processes(started):
    """The program and all processes that it has started."""
    [first] = psutil.Process(started.pid).children()
    return first.children(recursive=True)


def ranks(started):
    """The processes of ranks that a program has started."""
    return [each for each in all_processes(started) if each.name().startswith("longhelix ")]


def _ip(*arguments):
    _output("ip", *arguments)


def _tc(namespace, *arguments):
    try:
        _output("ip", "netns", "exec", namespace, "tc", *arguments)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"links cannot be made worse here: {error.stderr.strip()}")


def _output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
