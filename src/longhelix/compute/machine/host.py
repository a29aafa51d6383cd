"""Detects the cores and the memory that this process may use. Containers may use less than the host has.

Sources: cpuset by sched_getaffinity(2); cpu.max, memory.max and memory.high of cgroup v2, cpu.cfs_quota_us and
memory.limit_in_bytes of v1 (the kernel's admin-guide/cgroup-v2.rst and cgroup-v1). A limit holds for a group and all
groups in it, so the way up to the root counts.
"""

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import psutil

_ROOT = Path("/")
_NO_LIMIT_BYTES = 2**60  # v1 writes the largest multiple of a page where there is none


def cores(root: Path = _ROOT) -> int:
    """Return the number of cores that this process can keep busy, from its affinity and its quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(int(min([affinity, *_quotas(root)])), 1)


def processor(root: Path = _ROOT) -> str:
    """Return the name of the first core's model, such as "AMD EPYC 9654 96-Core Processor"."""
    return _of_processor(root, "model name") or platform.processor() or platform.machine()


def instruction_sets(root: Path = _ROOT) -> list[str]:
    """Return the kernel's names of the first core's instruction set extensions."""
    return (_of_processor(root, "flags") or _of_processor(root, "Features")).split()


def memory_bytes(root: Path = _ROOT) -> int:
    """Return the memory that this process and those that share its limits may use together."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits(root))])


def available_bytes(root: Path = _ROOT) -> int:
    """Return the memory that this process can still allocate without swapping, within all limits."""
    return max(min([psutil.virtual_memory().available, *(limit - used for limit, used in _limits(root))]), 0)


def last_level_cache_bytes(root: Path = _ROOT) -> int | None:
    """Return the size of the first core's largest cache, or None if it is unknown."""
    paths = (root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    sizes = (_read(path).strip().removesuffix("K") for path in paths)
    return max((1024 * int(size) for size in sizes if size.isdigit()), default=None)


def _of_processor(root: Path, name: str) -> str:
    """Return a field of the first core in /proc/cpuinfo, or "" if it does not exist."""
    lines = (line.partition(":") for line in _read(root / "proc/cpuinfo").splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quota in cores of each group of this process that has one."""
    for group in _groups(root, ""):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdigit():
            yield int(quota) / int(period)
    for group in _groups(root, "cpu"):
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        if quota is not None and quota > 0 and period:
            yield quota / period


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Of each group that this process is in and that is limited: bytes that it may have, and those that it has. Files
    that were only read do not count, as in the host's number: they go when memory is wanted."""
    names = (
        ("", ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")),
        (
            "memory",
            ("memory.limit_in_bytes",),
            "memory.usage_in_bytes",
            ("total_inactive_file", "total_active_file"),
        ),
    )
    for controller, limit_names, used_name, file_names in names:
        for group in _groups(root, controller):
            limits = [limit for name in limit_names if (limit := _number(group / name)) is not None]
            limit, used = min(limits, default=_NO_LIMIT_BYTES), _number(group / used_name)
            if used is not None and limit < _NO_LIMIT_BYTES:
                yield limit, max(used - _statistic(group, file_names), 0)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The group of this process and all above it; `controller` is empty for v2."""
    for line in _read(root / "proc/self/cgroup").split("\n"):
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        names = controllers.split(",")
        if colon and controller in names:
            below = Path(path.lstrip("/"))
            for mount in _mounts(root / "sys/fs/cgroup", names):
                # In a container the path may be the host's, of which only the mount, its own group, can be seen.
                yield from (mount / group for group in (below, *below.parents) if (mount / group).is_dir())


def _mounts(folder: Path, names: list[str]) -> Iterator[Path]:
    """Where controllers that share a mount may be found. Its name has all of them, in an order of its own, or one."""
    if names == [""]:
        yield folder
    elif folder.is_dir():
        yield from (mount for mount in folder.iterdir() if not set(names).isdisjoint(mount.name.split(",")))


def _statistic(group: Path, names: tuple[str, ...]) -> int:
    """Return the sum of some numbers of a group."""
    lines = (line.split() for line in _read(group / "memory.stat").splitlines())
    return sum(int(value) for key, value in lines if key in names)


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _read(path: Path) -> str:
    """Return the text of a file, or "" if it does not exist."""
    try:
        return os.fsdecode(path.read_bytes())
    except OSError:
        return ""
