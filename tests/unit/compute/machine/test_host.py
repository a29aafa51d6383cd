"""Cores and memory of containers: by files as the kernel writes them, and by real groups where this can make them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from longhelix.compute.machine import host

pytestmark = pytest.mark.unit

GI = 2**30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A host of 64 cores and 512 GiB, 500 of them free; returns how to write its files."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    memory = type("Memory", (), {"total": 512 * GI, "available": 500 * GI})
    monkeypatch.setattr(host.psutil, "virtual_memory", lambda: memory)

    def write(files):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return write


V2 = "0::/pod/engine\n"
V1 = "5:cpu,cpuacct:/docker/1234\n4:memory:/docker/1234\n0::/\n"
SET = "sys/fs/cgroup/"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 64),
        ({"proc/self/cgroup": V2, SET + "pod/engine/cpu.max": "max 100000\n"}, 64),
        ({"proc/self/cgroup": V2, SET + "pod/engine/cpu.max": "200000 100000\n"}, 2),
        ({"proc/self/cgroup": V2, SET + "pod/engine/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": V2, SET + "pod/engine/cpu.max": "50000 100000\n"}, 1),
        ({"proc/self/cgroup": V2, SET + "pod/engine/x": "", SET + "pod/cpu.max": "300000 100000\n"}, 3),
        ({"proc/self/cgroup": V2, SET + "cpu.max": "400000 100000\n"}, 4),
        (
            {
                "proc/self/cgroup": V1,
                SET + "cpu,cpuacct/docker/1234/cpu.cfs_quota_us": "200000\n",
                SET + "cpu,cpuacct/docker/1234/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": V1,
                SET + "cpu/cpu.cfs_quota_us": "600000\n",
                SET + "cpu/cpu.cfs_period_us": "100000\n",
            },
            6,
        ),
        ({"proc/self/cgroup": V1, SET + "cpu/cpu.cfs_quota_us": "-1\n", SET + "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        (
            {
                "proc/self/cgroup": "5:cpuacct,cpu:/docker/1234\n",
                SET + "cpu,cpuacct/docker/1234/cpu.cfs_quota_us": "200000\n",
                SET + "cpu,cpuacct/docker/1234/cpu.cfs_period_us": "100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "5:cpu,cpuacct:/\n",
                SET + "cpuacct/cpu.cfs_quota_us": "300000\n",
                SET + "cpuacct/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        ({"proc/self/cgroup": "nonsense\n0:\n" + V2, SET + "pod/engine/cpu.max": "200000 100000\n"}, 2),
    ],
    ids=[
        "none",
        "no quota",
        "two",
        "two and a half",
        "half",
        "a parent's",
        "a container's",
        "v1",
        "v1 inside",
        "v1 none",
        "v1 in another order",
        "v1 under another's name",
        "lines of another form",
    ],
)
def test_cores_are_what_the_quota_pays_for(machine, files, cores):
    assert host.cores(machine(files)) == cores


def test_a_group_may_have_a_name_that_is_no_text(machine):
    root = machine({"proc/self/cgroup": ""})
    group = root / "sys/fs/cgroup" / os.fsdecode(b"pod-\xff")
    group.mkdir(parents=True)
    (group / "cpu.max").write_text("200000 100000\n")
    (root / "proc/self/cgroup").write_bytes(b"0::/pod-\xff\n")
    assert host.cores(root) == 2


def test_cores_are_those_that_this_process_may_run_on(machine, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5})
    assert host.cores(machine({"proc/self/cgroup": V2, SET + "pod/engine/cpu.max": "800000 100000\n"})) == 2


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        ({}, 512, 500),
        ({"memory.max": "max\n", "memory.current": f"{GI}\n"}, 512, 500),
        ({"memory.max": f"{8 * GI}\n", "memory.current": f"{3 * GI}\n"}, 8, 5),
        ({"memory.max": f"{8 * GI}\n", "memory.current": f"{3 * GI}\n", "memory.stat": f"inactive_file {GI}\n"}, 8, 6),
        (
            {
                "memory.max": f"{8 * GI}\n",
                "memory.current": f"{6 * GI}\n",
                "memory.stat": f"anon {GI}\ninactive_file {GI}\nactive_file {2 * GI}\n",
            },
            8,
            5,
        ),
        ({"memory.max": f"{2 * GI}\n", "memory.current": f"{3 * GI}\n"}, 2, 0),
        ({"memory.max": "max\n", "memory.high": f"{4 * GI}\n", "memory.current": f"{GI}\n"}, 4, 3),
        ({"memory.max": f"{8 * GI}\n", "memory.high": f"{4 * GI}\n", "memory.current": f"{GI}\n"}, 4, 3),
        ({"memory.max": f"{2 * GI}\n", "memory.high": f"{4 * GI}\n", "memory.current": f"{GI}\n"}, 2, 1),
    ],
    ids=[
        "none",
        "no limit",
        "a limit",
        "files that can go",
        "files in use that can go",
        "over it",
        "high alone",
        "high below max",
        "max below high",
    ],
)
def test_memory_is_what_the_limit_leaves(machine, files, total, available):
    root = machine({"proc/self/cgroup": V2} | {SET + "pod/engine/" + name: text for name, text in files.items()})
    assert (host.memory_bytes(root), host.available_bytes(root)) == (total * GI, available * GI)


def test_memory_of_v1_has_no_limit_where_the_kernel_writes_its_largest_number(machine):
    files = {"memory.limit_in_bytes": f"{2**63 - 4096}\n", "memory.usage_in_bytes": f"{3 * GI}\n"}
    root = machine(
        {"proc/self/cgroup": V1} | {SET + "memory/docker/1234/" + name: text for name, text in files.items()}
    )
    assert host.available_bytes(root) == 500 * GI
    files["memory.limit_in_bytes"] = f"{4 * GI}\n"
    root = machine({SET + "memory/docker/1234/" + name: text for name, text in files.items()})
    assert host.available_bytes(root) == GI
    root = machine({SET + "memory/docker/1234/memory.stat": f"total_inactive_file {GI}\ntotal_active_file {GI}\n"})
    assert host.available_bytes(root) == 3 * GI


@pytest.fixture
def real_group():
    """Makes a group with limits, as a container's; where cgroup v1 is mounted and this may write there."""
    made = []

    def make(controller, limits):
        group = Path("/sys/fs/cgroup", controller, f"longhelix-test-{os.getpid()}")
        try:
            group.mkdir()
            made.append(group)
            for name, value in limits.items():
                (group / name).write_text(str(value))
        except OSError as error:
            pytest.skip(f"groups with limits cannot be made here: {error}")
        return group / "cgroup.procs"

    yield make
    for group in made:
        group.rmdir()


def ask_inside(members, question):
    """What a process that has joined a group says of this host."""
    program = f"""
import os
from pathlib import Path
Path({str(members)!r}).write_text(str(os.getpid()))
from longhelix.compute.machine import host
print({question})
"""
    return int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


def test_a_process_in_a_real_group_finds_its_quota_and_its_limit(real_group):
    members = real_group("cpu", {"cpu.cfs_period_us": 100_000, "cpu.cfs_quota_us": 100_000})
    assert ask_inside(members, "host.cores()") == 1
    members = real_group("memory", {"memory.limit_in_bytes": GI})
    assert GI // 2 < ask_inside(members, "host.available_bytes()") < GI


def test_the_last_level_cache_is_the_largest_of_the_first_core(tmp_path):
    assert host.last_level_cache_bytes(tmp_path) is None
    for index, size in enumerate(("48K", "32K", "2048K", "107520K")):
        folder = tmp_path / "sys/devices/system/cpu/cpu0/cache" / f"index{index}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(f"{size}\n")
    assert host.last_level_cache_bytes(tmp_path) == 107520 * 1024
