"""What steps cost on the engine's machine: what its own decisions are made by."""

from longhelix.perf.setting import Setting
from longhelix.perf.step_cost import StepCost
from longhelix.runner.config import EngineConfig
from longhelix.spec import HardwareSpec


def step_cost(config: EngineConfig, overlaps: bool) -> StepCost:
    """`overlaps`: what ranks send travels while they compute, because they do not share memory."""
    return StepCost(
        Setting(config.spec, _system(config, overlaps), config.weight_dtype, config.kv_dtype), config.layout
    )


def _system(config: EngineConfig, overlaps: bool) -> HardwareSpec:
    """The engine's machine as its collectives meet it."""
    system = config.system.replaced({"part_fixed_share": 1.0}, "each part is a collective of its own")
    if config.device == "cpu" and overlaps:  # ranks that do not share memory meet as hosts do
        system = system.replaced({"scale_up.ranks": 1}, "ranks that do not share memory")
    return system
