"""The cost of steps on the engine's machine. By it the engine decides how to cut and place them."""

from longhelix.compute.runner.config import EngineConfig
from longhelix.perf.setting import Setting
from longhelix.perf.step_cost import StepCost
from longhelix.spec import HardwareSpec


def step_cost(config: EngineConfig, overlaps: bool) -> StepCost:
    """The cost of this engine's steps. `overlaps`: ranks do not share memory, so what they send travels while they
    compute."""
    return StepCost(
        Setting(config.spec, _system(config, overlaps), config.product_dtype, config.kv_dtype), config.layout
    )


def _system(config: EngineConfig, overlaps: bool) -> HardwareSpec:
    """The engine's machine, with the links that its collectives go over."""
    system = config.system.replaced({"part_fixed_share": 1.0}, "each part is a collective of its own")
    if config.device == "cpu" and overlaps:  # ranks that do not share memory meet as hosts do
        system = system.replaced({"scale_up.ranks": 1}, "ranks that do not share memory")
    return system
