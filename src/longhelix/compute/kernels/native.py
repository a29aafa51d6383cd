"""The native CPU kernels. `module` is None if the installation was built without a compiler."""

import importlib
import importlib.util

import torch

from longhelix.spec import Activation

_spec = importlib.util.find_spec("longhelix._native")
module = importlib.import_module("longhelix._native") if _spec else None

LANES = 16  # tokens of a tile, outputs of a panel
LONGEST_HEAD = 512  # channels that the merge of shared memory takes


def _openmp_library() -> str | None:
    """Return the OpenMP runtime that torch has loaded. A second one would compete with it for the cores."""
    try:
        with open("/proc/self/maps") as maps:
            loaded = {line.split()[-1] for line in maps if "/" in line}
    except OSError:
        return None
    return next((path for path in sorted(loaded) if "libgomp" in path or "libomp" in path or "libiomp" in path), None)


def set_num_threads(count: int) -> None:
    """Set the number of threads, which torch's kernels and ours share."""
    torch.set_num_threads(count)
    if module is not None:
        module.set_threads(count)


def activation(given: Activation | None) -> tuple:
    """Return an activation in the form that native kernels take."""
    function = "none" if given is None else given.function
    return getattr(module.Function, function), given is not None and given.gated


if module is not None:
    if (_library := _openmp_library()) is not None:
        module.use_openmp(_library)
    module.set_threads(torch.get_num_threads())
    # The native module's name of what a tensor of each dtype holds.
    NUMBER_BY_DTYPE = {
        getattr(torch, name): getattr(module.Number, name)
        for name in ("float32", "float64", "bfloat16", "float16", "int32", "int64")
    }
