"""Explain the time of a cost item: which constant determines the time, and where the constant's value comes from."""

from longhelix.perf.cost_item import CostItem
from longhelix.perf.step import WAIT
from longhelix.spec import FORMATS, HardwareSpec

_KINDS = ("measured", "fitted", "assumed")


def kind(system: HardwareSpec, constant: str) -> str:
    """Return the origin of a constant's value, as its source states it: measured, fitted, assumed or published."""
    first = system.sources[constant].split(":")[0].split(",")[0].strip().lower()
    return first if first in _KINDS else "published"


def source(system: HardwareSpec, item: CostItem, position: int, dtype: str) -> str:
    """Describe what determines the seconds of a cost item: memory, arithmetic, the network or fixed costs.

    Args:
        position: index of the layout in the item's arrays.
        dtype: number format of the item's arithmetic.
    """
    seconds, fixed_s = float(item.seconds[position]), float(item.fixed_s[position])
    if seconds == 0:
        return "takes no time"
    sends = float(item.net_bytes[position]) > 0 and float(item.hbm_bytes[position]) == 0
    if item.name == "host":
        return f"{kind(system, 'step_s')}: step_s"
    if item.name == WAIT:
        return "wait for the stage with the output head or the embedding"
    if fixed_s >= seconds / 2:
        name = "collective_s" if sends else "kernel_s"
        return f"{kind(system, name)}: {name}"
    if sends:
        return f"roofline: scale_up.bytes_per_s ({kind(system, 'scale_up.bytes_per_s')})"
    if item.compute_bound[position]:
        rate = f"flops_per_s.{FORMATS[dtype].arithmetic.format or dtype}"
        rate = rate if rate in system.sources else "flops_per_s.bfloat16"
        return f"roofline: {rate} ({kind(system, rate)})"
    return f"roofline: memory_bytes_per_s ({kind(system, 'memory_bytes_per_s')})"
