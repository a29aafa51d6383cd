"""Calibration: the system "local" from what this machine was measured to do."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import torch

from longhelix.bench import collectives, decode, memory, prefill
from longhelix.bench.environment import last_level_cache_bytes
from longhelix.bench.formulas import linear_flops
from longhelix.bench.measure import interleave
from longhelix.bench.world import Row, collect
from longhelix.kernels import Weight, linear, make_weight, native
from longhelix.kernels.tape import Tape
from longhelix.layout import Layout
from longhelix.machine import host
from longhelix.perf.fit import Call, Run, fit_calls, fit_runs
from longhelix.perf.setting import Setting
from longhelix.presets import load_system
from longhelix.runner.config import EngineConfig
from longhelix.spec import HardwareSpec

RANKS = (2, 4)
SIZES_BYTES = (2048, 32768, 524288)  # of collectives: those of a decode step are small, those of a chunk large
MOST_RANKS = 64
TINY_KERNELS = 256
PRODUCT_DTYPES = ("float32", "bfloat16", "int8", "int4")
PRODUCT_ROWS = (1, 16, 128, 512)  # a decode step's, and those of prefill chunks
_PRODUCT_SIZE = 2048


@dataclass(frozen=True)
class Extent:
    """What is measured on every layout, and how often."""

    contexts: tuple[int, ...]
    decode_repeats: int
    prompts: tuple[int, ...]
    prefill_repeats: int
    machine_repeats: int
    collective_repeats: int

    def fits(self, run: Row) -> bool:
        """Whether the run is one of this extent on one rank in bfloat16: those that constants are fitted to."""
        tokens = self.contexts if run["chunk"] is None else self.prompts
        return run["tokens"] in tokens and run["ranks"] == 1 and run["weight_dtype"] == run["kv_dtype"] == "bfloat16"


SHORT = Extent((2048, 16384), 11, (512, 2048), 2, 7, 8)
FULL = Extent((2048, 32768), 21, (512, 4096), 3, 15, 25)


class MachineJob(msgspec.Struct, frozen=True, tag=True):
    """What one process measures with all threads beside runs of a model: a kernel's fixed cost, float32 products."""

    repeats: int

    @torch.inference_mode()
    def measure(self, rank: int, directory: Path) -> Iterator[Row]:
        native.set_num_threads(host.cores())
        calls = {"kernels": _tiny_kernels(), "matmul": memory.multiplier(torch.float32)}
        timings = interleave(calls, self.repeats)
        yield {
            "kernel_s": timings["kernels"].median_s / TINY_KERNELS,
            "flops_per_s.float32": memory.MULTIPLIER_FLOPS / timings["matmul"].median_s,
        }


class ProductsJob(msgspec.Struct, frozen=True, tag=True):
    """Rates of the engine's own products, by the weight's dtype and by rows, all threads."""

    repeats: int

    @torch.inference_mode()
    def measure(self, rank: int, directory: Path) -> Iterator[Row]:
        native.set_num_threads(host.cores())
        weights = {dtype: _square(dtype) for dtype in PRODUCT_DTYPES}
        for rows in PRODUCT_ROWS:
            x_TX = torch.randn(rows, _PRODUCT_SIZE).bfloat16()
            calls = {
                dtype: partial(linear, x_TX.float() if dtype == "float32" else x_TX, weight)
                for dtype, weight in weights.items()
            }
            for dtype, timing in interleave(calls, self.repeats).items():
                flops = linear_flops(rows, _PRODUCT_SIZE, _PRODUCT_SIZE)
                yield {"weight_dtype": dtype, "rows": rows, "flops_per_s": flops / timing.median_s}


def _square(dtype: str) -> Weight:
    values = torch.randn(_PRODUCT_SIZE, _PRODUCT_SIZE)
    return make_weight(values if dtype == "float32" else values.bfloat16(), dtype)


def _tiny_kernels() -> Callable[[], None]:
    """A tape of TINY_KERNELS products that compute next to nothing."""
    weight, x_TX, tape = make_weight(torch.randn(16, 32).bfloat16(), "bfloat16"), torch.randn(1, 32).bfloat16(), Tape()
    with tape:
        for _ in range(TINY_KERNELS):
            linear(x_TX, weight)
    return tape.run


@dataclass(frozen=True)
class Measured:
    """What calibration is made of: the machine, its collectives, and runs of the model."""

    machine: Row
    products: Sequence[Row]
    collectives: Sequence[Row]
    runs: Sequence[Row]

    @classmethod
    def by(
        cls, extent: Extent, configs: Sequence[EngineConfig], on_point: Callable[[str], Callable[[Row], None]]
    ) -> "Measured":
        """Measure now; `on_point` gives, for each part's name, what is told of its points."""
        ((machine,),) = collect(MachineJob(extent.machine_repeats), 1, on_point("machine"))
        products = [row for (row,) in collect(ProductsJob(extent.machine_repeats), 1, on_point("products"))]
        calls = collectives.section(RANKS, SIZES_BYTES, extent.collective_repeats, on_point("collectives")).rows
        # What depends on bandwidth, which may change from minute to minute, is measured together.
        steps = _steps(extent, configs, on_point("decode"))
        return cls(machine, products, calls, steps + _prefills(extent, configs, on_point("prefill")))

    def system(self, config: EngineConfig, fitted: Extent) -> HardwareSpec:
        """The system "local": what was measured, and what is fitted to collectives and to the runs of `fitted`."""
        runs = [run for run in self.runs if fitted.fits(run)]
        machine = self.machine | {
            "step_s": _median(runs, "outside_s", "decode"),
            "memory_bytes_per_s": _median(runs, "memory_bytes_per_s", "decode"),
            "flops_per_s.bfloat16": _median(runs, "matmul_flops_per_s", "prefill"),
        }
        machine |= _narrow_rates(self.products, machine["flops_per_s.bfloat16"])
        started = HardwareSpec.from_mapping("local", _first(machine))
        calls = [Call(row["collective"], row["ranks"], row["bytes"], row["shm_s"]) for row in self.collectives]
        setting = Setting(config.spec, fit_calls(started, calls), config.weight_dtype, config.kv_dtype)
        return fit_runs(setting, [run_of(row) for row in runs])


def _median(runs: Sequence[Row], key: str, work: str) -> float:
    return statistics.median(run[key] for run in runs if run["work"] == work)


def _narrow_rates(products: Sequence[Row], bfloat16_flops_per_s: float) -> Row:
    """Peaks of narrow weights: that of bfloat16, as much slower as the engine's products of most rows are."""
    rates = {row["weight_dtype"]: row["flops_per_s"] for row in products if row["rows"] == max(PRODUCT_ROWS)}
    return {
        f"flops_per_s.{dtype}": bfloat16_flops_per_s * rates[dtype] / rates["bfloat16"] for dtype in ("int8", "int4")
    }


def _steps(extent: Extent, configs: Sequence[EngineConfig], on_point: Callable[[Row], None]) -> list[Row]:
    jobs = [decode.DecodeJob(config, extent.contexts, extent.decode_repeats) for config in configs]
    return [
        row | {"work": "decode", "tokens": row["context"], "chunk": None, "seconds": row["step_s"]}
        for row in decode.section(jobs, on_point).rows
    ]


def _prefills(extent: Extent, configs: Sequence[EngineConfig], on_point: Callable[[Row], None]) -> list[Row]:
    jobs = [prefill.PrefillJob(config, extent.prompts, extent.prefill_repeats) for config in configs]
    return [
        row | {"work": "prefill", "tokens": row["prompt"], "chunk": row["chunk_tokens"], "seconds": row["prefill_s"]}
        for row in prefill.section(jobs, on_point).rows
    ]


def run_of(row: Row) -> Run:
    """What is fitted or predicted of a run."""
    kvp, tpa = map(int, row["layout"].split(" x "))
    return Run(Layout(kvp=kvp, tpa=tpa), row["tokens"], row["chunk"], row["seconds"])


def _first(machine: Row) -> dict[str, Row]:
    """The system before its fits, which replace the guesses."""
    preset = load_system("cpu")
    values = {
        "memory_bytes_per_s": (machine["memory_bytes_per_s"], "measured: the read kernel, in turn with decode steps"),
        "memory_bytes": (host.memory_bytes(), "measured: memory of this machine, which its ranks share"),
        "cache_bytes": (last_level_cache_bytes() or 1 << 25, "measured: the last-level cache, 32 MiB where none tells"),
        "memory_efficiency": (0.8, "guess"),
        "compute_efficiency": (0.8, "guess"),
        "attention_efficiency": (0.8, "guess"),
        "kernel_s": (machine["kernel_s"], f"measured: a tape of {TINY_KERNELS} tiny products"),
        "collective_s": (5e-6, "guess"),
        "step_s": (machine["step_s"], "measured: a decode step on one rank outside of native kernels"),
        "part_fixed_share": (1, "assumed: each part would be a collective of its own"),
        "part_s": (preset.part_s, f"assumed: that of the preset {preset.name}"),
        "in_switch_reduction": (False, "assumed: between processes there is no switch"),
        "prefetch": (False, "assumed: kernels begin to read when they begin"),
        "shared": (True, "assumed: ranks are processes of this machine"),
        "flops_per_s.bfloat16": (
            machine["flops_per_s.bfloat16"],
            "measured: torch.mm of 1024 x 1024, in turn with prefills",
        ),
        "flops_per_s.float32": (machine["flops_per_s.float32"], "measured: torch.mm of 1024 x 1024, all threads"),
        "flops_per_s.float16": (machine["flops_per_s.float32"], "assumed: as float32, in which kernels compute it"),
        "flops_per_s.fp8": (machine["flops_per_s.bfloat16"], "assumed: as bfloat16, into which kernels turn it"),
        **{
            f"flops_per_s.{dtype}": (
                machine[f"flops_per_s.{dtype}"],
                f"measured: bfloat16's, by the engine's products of {max(PRODUCT_ROWS)} rows beside each other",
            )
            for dtype in ("int8", "int4")
        },
        "scale_up.latency_s": (5e-6, "guess"),
        "scale_up.bytes_per_s": (4e9, "guess"),
        "scale_up.ranks": (MOST_RANKS, "assumed: the most processes of one machine"),
        "scale_out.latency_s": (1e-3, "assumed: there is no second machine"),
        "scale_out.bytes_per_s": (1e9, "assumed: there is no second machine"),
        "scale_out.ranks": (MOST_RANKS, "assumed: there is no second machine"),
    }
    return {name: {"value": value, "source": source} for name, (value, source) in values.items()}
