"""Creates the system `local` from measurements of this machine, and from constants fitted to the measurements."""

import statistics
from collections.abc import Sequence

from longhelix.compute.machine import host
from longhelix.compute.runner.config import EngineConfig
from longhelix.measure.calibrate.machine import NARROW_DTYPES, PRODUCT_ROWS, TINY_KERNELS
from longhelix.measure.calibrate.measurements import CalibrationScope, Measurements, measured_request
from longhelix.measure.world import Row
from longhelix.perf.fit import MeasuredCollective, fit_collectives, fit_requests
from longhelix.perf.setting import Dtypes, Setting
from longhelix.spec import HardwareSpec
from longhelix.spec.presets import load_system

MOST_RANKS = 64


def local_system(measured: Measurements, config: EngineConfig, fitted: CalibrationScope) -> HardwareSpec:
    """Create the system `local`.

    Args:
        measured: measurements of this machine.
        config: engine configuration of the measured model.
        fitted: scope of the requests to which constants are fitted.
    """
    requests = [row for row in measured.requests if fitted.includes(row)]
    machine = measured.machine | {
        "step_s": _median(requests, "outside_s", "decode"),
        "memory_bytes_per_s": _median(requests, "memory_bytes_per_s", "decode"),
        "flops_per_s.bfloat16": _median(requests, "matmul_flops_per_s", "prefill"),
    }
    machine |= _narrow_rates(measured.products, machine["flops_per_s.bfloat16"])
    started = HardwareSpec.from_mapping("local", _before_fits(machine))
    collectives = [
        MeasuredCollective(row["collective"], row["ranks"], row["bytes"], row["shm_s"]) for row in measured.collectives
    ]
    dtypes = Dtypes(config.formats.product_dtype, config.formats.kv_dtype)
    setting = Setting(config.spec, fit_collectives(started, collectives), dtypes)
    return fit_requests(setting, [measured_request(row) for row in requests])


def _median(requests: Sequence[Row], key: str, work: str) -> float:
    return statistics.median(row[key] for row in requests if row["work"] == work)


def _narrow_rates(products: Sequence[Row], bfloat16_flops_per_s: float) -> Row:
    """FLOP/s with narrow weights.

    The rate is the bfloat16 rate, multiplied by the measured ratio of the engine's largest products in both dtypes.
    """
    rates = {row["weight_dtype"]: row["flops_per_s"] for row in products if row["rows"] == max(PRODUCT_ROWS)}
    return {f"flops_per_s.{dtype}": bfloat16_flops_per_s * rates[dtype] / rates["bfloat16"] for dtype in NARROW_DTYPES}


def _before_fits(machine: Row) -> dict[str, Row]:
    """Return the constants before fitting. The fits replace the values whose source is "guess"."""
    preset = load_system("cpu")
    values = {
        "memory_bytes_per_s": (
            machine["memory_bytes_per_s"],
            "measured: rate of the read kernel, which ran in turn with decode steps",
        ),
        "memory_bytes": (host.memory_bytes(), "measured: memory of this machine, which all ranks share"),
        "reserve_bytes": (preset.memory.reserve_bytes, f"assumed: value of the preset {preset.name}"),
        "memory_efficiency": (0.8, "guess"),
        "compute_efficiency": (0.8, "guess"),
        "attention_efficiency": (0.8, "guess"),
        "kernel_s": (machine["kernel_s"], f"measured: time of a tape of {TINY_KERNELS} tiny products, per product"),
        "collective_s": (preset.fixed.collective_s, f"assumed: value of the preset {preset.name}"),
        "step_s": (machine["step_s"], "measured: time of a decode step on one rank outside native kernels"),
        "part_fixed_share": (1, "assumed: each part of an exchange is a separate collective"),
        "part_s": (preset.fixed.part_s, f"assumed: value of the preset {preset.name}"),
        "swap_bytes_per_s": (preset.memory.swap_bytes_per_s, f"assumed: value of the preset {preset.name}"),
        "in_switch_reduction": (False, "assumed: no switch connects the processes"),
        "shared": (True, "assumed: all ranks are processes of this machine"),
        "cores": (host.cores(), "measured: number of cores that this process may use"),
        "node_ranks": (preset.network.node_ranks, f"assumed: value of the preset {preset.name}"),
        "flops_per_s.bfloat16": (
            machine["flops_per_s.bfloat16"],
            "measured: torch.mm of 1024 x 1024 matrices, which ran in turn with prefills",
        ),
        "flops_per_s.float32": (
            machine["flops_per_s.float32"],
            "measured: torch.mm of 1024 x 1024 matrices on all threads",
        ),
        "flops_per_s.float16": (machine["flops_per_s.float32"], "assumed: as float32: kernels compute float16 in it"),
        "flops_per_s.fp8": (machine["flops_per_s.bfloat16"], "assumed: as bfloat16, to which kernels convert fp8"),
        **{
            f"flops_per_s.{dtype}": (
                machine[f"flops_per_s.{dtype}"],
                f"measured: bfloat16 rate, scaled by the ratio of {max(PRODUCT_ROWS)}-row products in both dtypes",
            )
            for dtype in NARROW_DTYPES
        },
        "scale_up.latency_s": (5e-6, "guess"),
        "scale_up.bytes_per_s": (4e9, "guess"),
        "scale_up.ranks": (MOST_RANKS, "assumed: maximum number of processes on one machine"),
        "scale_out.latency_s": (1e-3, "assumed: there is no second machine"),
        "scale_out.bytes_per_s": (1e9, "assumed: there is no second machine"),
        "scale_out.ranks": (MOST_RANKS, "assumed: there is no second machine"),
    }
    return {name: {"value": value, "source": source} for name, (value, source) in values.items()}
