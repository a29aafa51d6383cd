"""Detects the GPUs and the native CPU kernels of this host without loading torch."""

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess

_TIMEOUT_S = 30


def has_native_kernels() -> bool:
    """Return whether the native kernels are installed. They are not if there was no C++ compiler."""
    return importlib.util.find_spec("longhelix._native") is not None


def native_instruction_set() -> str | None:
    """Return the instruction set of the native kernels, or None if there are none."""
    return str(importlib.import_module("longhelix._native").instruction_set()) if has_native_kernels() else None


def multiplies_integers() -> bool:
    """Return whether the native kernels compute attention in integers on this machine."""
    return native_instruction_set() == "avx512"


def free_gpu_bytes() -> list[int]:
    """Return the free memory of each GPU of this process, in torch's order. Empty if torch has no CUDA."""
    return [int(mebibytes) * 2**20 for mebibytes in _query("memory.free")]


def gpu_capabilities() -> list[tuple[int, int]]:
    """Return the compute capability of each of these GPUs, such as (9, 0)."""
    capabilities = (words.split(".") for words in _query("compute_cap"))
    return [(int(capability[0]), int(capability[1])) for capability in capabilities if len(capability) == 2]


def gpu_names() -> list[str]:
    """Return the name of each of these GPUs, such as "NVIDIA H100 80GB HBM3"."""
    return _query("name")


def _query(field: str) -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None or importlib.metadata.version("torch").endswith("+cpu"):
        return []
    query = [program, f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "":
        return []
    if visible is not None:
        query += ["--id", visible]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if answer.returncode:
        return []
    return answer.stdout.splitlines()
