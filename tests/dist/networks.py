"""Several hosts on one machine: network namespaces on a bridge, each with processes of its own."""

import ctypes
import itertools
import os
import shlex
import shutil
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

_NUMBERS = itertools.count()
_CLONE_NEWNET = 0x40000000
_OWN_FILES = Path("/etc/netns")  # has a folder for each host, with files that it sees in /etc


class Network:
    """Hosts 0, 1, ... with the addresses 10.77.0.1, 10.77.0.2, ...

    Processes of different hosts share no memory, see no processes of each other, and have loopback interfaces of their
    own. When a process that `start` has started ends, so do all that it has started.
    """

    def __init__(self, size):
        if os.geteuid():
            pytest.skip("network namespaces need root")
        tag = f"lh{os.getpid() % 100_000}x{next(_NUMBERS)}"
        self._switch, self._hosts = f"{tag}s", [f"{tag}h{node}" for node in range(size)]
        self.processes = []
        self._names = {"localhost": "127.0.0.1"}
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            self.close()
            pytest.skip(f"network namespaces do not work here: {error.stderr.decode().strip()}")

    def _make(self):
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge", "up")
        for node, host in enumerate(self._hosts):
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
            shutil.rmtree(_OWN_FILES / namespace, ignore_errors=True)
        with suppress(OSError):  # unless others have files there
            _OWN_FILES.rmdir()

    def address(self, node):
        return f"10.77.0.{node + 1}"

    def name(self, name, node):
        """Give a host a name, which another host may have had. Processes that start later know it."""
        self._names[name] = self.address(node)
        for host in self._hosts:
            (_OWN_FILES / host).mkdir(parents=True, exist_ok=True)
            lines = [f"{address} {name}\n" for name, address in self._names.items()]
            (_OWN_FILES / host / "hosts").write_text("".join(lines))  # the same file, which processes have mounted

    def start(self, node, arguments, folders=None, **settings):
        """Start Python on a host. folders: by path, the folders that this host alone has in place of others."""
        new_processes = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        mounts = [
            f"mount --bind {shlex.quote(str(own))} {shlex.quote(str(path))}" for path, own in (folders or {}).items()
        ]
        shell = ["sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh"]
        command = ["ip", "netns", "exec", self._hosts[node], *new_processes, *shell, sys.executable, *arguments]
        process = subprocess.Popen(command, **({"stdin": subprocess.DEVNULL, "text": True} | settings))
        self.processes.append(process)
        return process

    def signal(self, process, number):
        """Send a signal to Python, which `start` has started."""
        (own,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(own), number)

    def cut(self, node):
        """Take a host off the network."""
        _ip("-n", self._switch, "link", "set", f"p{node}", "down")

    def join(self, node):
        """Bring it back."""
        _ip("-n", self._switch, "link", "set", f"p{node}", "up")

    def lose(self, node, other):
        """Lose all that a host sends to another one from now on."""
        self.run(node, "ip", "neigh", "replace", self.address(other), "lladdr", "02:00:00:00:00:01", "dev", "eth0")

    def run(self, node, *command):
        """Run a command in a host's network."""
        return subprocess.run(
            ["ip", "netns", "exec", self._hosts[node], *command], check=True, capture_output=True, text=True
        ).stdout

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


def _ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
