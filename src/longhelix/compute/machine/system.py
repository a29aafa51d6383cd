"""The hardware constants of this machine, which the engine uses for its decisions."""

import os

from longhelix.compute.machine.devices import gpu_names
from longhelix.spec import KV_DTYPES, HardwareSpec
from longhelix.spec.presets import load_system, local_system_path, system_names

_UNKNOWN_GPU = "h100"


def machine(device: str) -> HardwareSpec:
    """Return the hardware on which ranks of `device` ("cpu" or "cuda") run.

    CPUs: the system "local" if `longhelix calibrate` has written it, else the preset "cpu". GPUs: the preset whose name
    is in the name of the first GPU, else that of H100s. Every dtype of a KV cache has a rate. Raises UserError if
    "local" cannot be read.
    """
    if device == "cpu":
        measured = local_system_path()
        system = load_system("local" if measured is not None and os.path.isfile(measured) else "cpu")
    else:
        system = load_system(_preset_of(gpu_names()))
    converted = [f"flops_per_s.{dtype}" for dtype in (*KV_DTYPES, "w8a8") if dtype not in system.arithmetic.flops_per_s]
    rate = system.rate("bfloat16")
    return system.replaced(dict.fromkeys(converted, rate), "assumed: as for bfloat16, to which the kernels convert it")


def _preset_of(names: list[str]) -> str:
    words = names[0].lower() if names else ""
    found = [name for name in system_names() if name in words]
    return max(found, key=len, default=_UNKNOWN_GPU)  # B200 is in the name of a GB200 as well
