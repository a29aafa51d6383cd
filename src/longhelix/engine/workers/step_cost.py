"""Predicts the cost of steps on the engine's machine. The engine uses it to size chunks and place requests."""

from longhelix.compute.runner.config import EngineConfig
from longhelix.perf.setting import Dtypes, Setting
from longhelix.perf.step_cost import StepCost
from longhelix.spec import HardwareSpec


def step_cost(config: EngineConfig, overlaps: bool) -> StepCost:
    """Return the cost model of this engine's steps.

    Args:
        config: the engine's configuration.
        overlaps: whether communication overlaps computation. This requires that ranks do not share memory.
    """
    return StepCost(
        Setting(
            config.spec,
            _system(config, overlaps),
            Dtypes(config.formats.product_dtype, config.formats.kv_dtype, packed=True),
        ),
        config.layout,
    )


def _system(config: EngineConfig, overlaps: bool) -> HardwareSpec:
    """Return the specification of the engine's machine, with the links that its collectives use."""
    machines = config.machines
    system = machines.system.replaced({"part_fixed_share": 1.0}, "each part is a collective of its own")
    if machines.device == "cpu" and len(machines.hosts.ranks) > 1:
        counts = [len(ranks) for ranks in machines.hosts.ranks]
        # The other ranks wait for those of the host that runs the most.
        system = system.of_machines(sum(counts) / max(counts))
        system = system.replaced({"scale_up.ranks": min(counts)}, "ranks of one host")
    elif machines.device == "cpu" and overlaps:  # these ranks communicate in the same way as ranks on different hosts
        system = system.replaced({"scale_up.ranks": 1}, "ranks that do not share memory")
    return system
