"""Measurements for the system `local`: of the machine, of its collectives, and of single requests to a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from longhelix.compute.runner.config import EngineConfig
from longhelix.measure import collectives, decode, prefill
from longhelix.measure.calibrate.machine import MachineJob, ProductsJob
from longhelix.measure.configuration import configure
from longhelix.measure.hosts import MeasuringHosts
from longhelix.measure.world import Row, collect
from longhelix.perf.fit import MeasuredRequest
from longhelix.spec.layout import Layout

RANKS = (2, 4)  # two values, so that fits can separate the fixed cost of a collective from its cost per rank
SIZES_BYTES = (2048, 32768, 524288)  # message sizes, from that of a decode step to that of a prefill chunk


@dataclass(frozen=True)
class CalibrationScope:
    """The points that a calibration measures, and the number of repeats."""

    contexts: tuple[int, ...]  # contexts of decode steps, in tokens
    decode_repeats: int
    prompts: tuple[int, ...]  # lengths of prefills, in tokens
    prefill_repeats: int
    machine_repeats: int
    collective_repeats: int

    def includes(self, row: Row) -> bool:
        """True if the fits use a row: the row has one of these lengths and ran on one rank in bfloat16."""
        tokens = self.contexts if row["chunk"] is None else self.prompts
        return row["tokens"] in tokens and row["ranks"] == 1 and row["weight_dtype"] == row["kv_dtype"] == "bfloat16"

    def config(self, layout: Layout, dtype: str) -> EngineConfig:
        """Configuration of the built-in model that has room for these requests, with weights and KV in `dtype`."""
        lengths = (*self.contexts, *self.prompts)
        return configure("builtin", layout, lengths, weight_dtype=dtype, kv_dtype=dtype)


SHORT = CalibrationScope(
    contexts=(2048, 16384),
    decode_repeats=11,
    prompts=(512, 2048),
    prefill_repeats=2,
    machine_repeats=7,
    collective_repeats=8,
)
FULL = CalibrationScope(
    contexts=(2048, 32768),
    decode_repeats=21,
    prompts=(512, 4096),
    prefill_repeats=3,
    machine_repeats=15,
    collective_repeats=25,
)


@dataclass(frozen=True)
class Measurements:
    """Rows of all measurements of a calibration."""

    machine: Row  # row of MachineJob
    products: Sequence[Row]  # rows of ProductsJob
    collectives: Sequence[Row]
    requests: Sequence[Row]  # decode steps and prefills of one request each

    @classmethod
    def take(
        cls,
        scope: CalibrationScope,
        configs: Sequence[EngineConfig],
        on_point: Callable[[str], Callable[[Row], None]],
        hosts: MeasuringHosts | None = None,
    ) -> Self:
        """Run all measurements.

        Args:
            scope: the points to measure, and the number of repeats.
            configs: engine configurations that run the requests.
            on_point: function that accepts the name of a measurement and returns a callback for its rows.
            hosts: hosts that measure at the same time, each by itself.
        """
        ((machine,),) = collect(MachineJob(scope.machine_repeats), 1, on_point("machine"), hosts=hosts)
        products = [row for (row,) in collect(ProductsJob(scope.machine_repeats), 1, on_point("products"), hosts=hosts)]
        calls = collectives.measure(RANKS, SIZES_BYTES, scope.collective_repeats, on_point("collectives"))
        # Decode and prefill run one right after the other, because memory bandwidth may change from minute to minute.
        jobs = [decode.DecodeJob(config, scope.contexts, scope.decode_repeats) for config in configs]
        steps = _steps(decode.measure(jobs, on_point("decode"), hosts))
        jobs = [prefill.PrefillJob(config, scope.prompts, scope.prefill_repeats) for config in configs]
        prefills = _prefills(prefill.measure(jobs, on_point("prefill"), hosts))
        return cls(machine, products, calls, steps + prefills)


def measured_request(row: Row) -> MeasuredRequest:
    """Convert a row of `Measurements.requests` to the type that fits and predictions use."""
    kvp, tpa = map(int, row["layout"].split(" x "))
    return MeasuredRequest(Layout(kvp=kvp, tpa=tpa), row["tokens"], row["chunk"], row["seconds"])


def _steps(rows: Sequence[Row]) -> list[Row]:
    return [row | {"work": "decode", "tokens": row["context"], "chunk": None, "seconds": row["step_s"]} for row in rows]


def _prefills(rows: Sequence[Row]) -> list[Row]:
    return [
        row | {"work": "prefill", "tokens": row["prompt"], "chunk": row["chunk_tokens"], "seconds": row["prefill_s"]}
        for row in rows
    ]
