"""What the system "local" is made of: the machine, its collectives, and one request at a time of the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from longhelix.compute.runner.config import EngineConfig
from longhelix.measure import collectives, decode, prefill
from longhelix.measure.calibrate.machine import MachineJob, ProductsJob
from longhelix.measure.configuration import configure
from longhelix.measure.world import Row, collect
from longhelix.perf.fit import MeasuredRequest
from longhelix.spec.layout import Layout

RANKS = (2, 4)  # of two sizes: one alone does not tell what a collective costs beside the latency of each peer
SIZES_BYTES = (2048, 32768, 524288)  # of collectives: those of a decode step are small, those of a chunk large


@dataclass(frozen=True)
class CalibrationScope:
    """How much is measured: decode steps at `contexts` and prefills of `prompts`, in tokens, on every layout, and the
    repeats of each measurement."""

    contexts: tuple[int, ...]
    decode_repeats: int
    prompts: tuple[int, ...]
    prefill_repeats: int
    machine_repeats: int
    collective_repeats: int

    def includes(self, row: Row) -> bool:
        """Whether the request has one of these lengths and ran on one rank in bfloat16, as those that constants are
        fitted to."""
        tokens = self.contexts if row["chunk"] is None else self.prompts
        return row["tokens"] in tokens and row["ranks"] == 1 and row["weight_dtype"] == row["kv_dtype"] == "bfloat16"

    def config(self, layout: Layout, dtype: str) -> EngineConfig:
        """The built-in model, with room for each of these requests. `dtype`: of weights and KV."""
        lengths = (*self.contexts, *self.prompts)
        return configure("builtin", layout, lengths, weight_dtype=dtype, kv_dtype=dtype)


SHORT = CalibrationScope((2048, 16384), 11, (512, 2048), 2, 7, 8)
FULL = CalibrationScope((2048, 32768), 21, (512, 4096), 3, 15, 25)


@dataclass(frozen=True)
class Measurements:
    """Rows as their jobs made them. machine: one row. requests: decode steps and prefills of one request each."""

    machine: Row
    products: Sequence[Row]
    collectives: Sequence[Row]
    requests: Sequence[Row]

    @classmethod
    def take(
        cls, scope: CalibrationScope, configs: Sequence[EngineConfig], on_point: Callable[[str], Callable[[Row], None]]
    ) -> Self:
        """Measure now, the requests with each of `configs`; `on_point` gives, for each kind of measurement by name,
        what is told of its points."""
        ((machine,),) = collect(MachineJob(scope.machine_repeats), 1, on_point("machine"))
        products = [row for (row,) in collect(ProductsJob(scope.machine_repeats), 1, on_point("products"))]
        calls = collectives.measure(RANKS, SIZES_BYTES, scope.collective_repeats, on_point("collectives"))
        # What depends on bandwidth, which may change from minute to minute, is measured together.
        steps = _steps(scope, configs, on_point("decode"))
        return cls(machine, products, calls, steps + _prefills(scope, configs, on_point("prefill")))


def measured_request(row: Row) -> MeasuredRequest:
    """What is fitted to, or predicted of, a row of `Measurements.requests`."""
    kvp, tpa = map(int, row["layout"].split(" x "))
    return MeasuredRequest(Layout(kvp=kvp, tpa=tpa), row["tokens"], row["chunk"], row["seconds"])


def _steps(scope: CalibrationScope, configs: Sequence[EngineConfig], on_point: Callable[[Row], None]) -> list[Row]:
    jobs = [decode.DecodeJob(config, scope.contexts, scope.decode_repeats) for config in configs]
    return [
        row | {"work": "decode", "tokens": row["context"], "chunk": None, "seconds": row["step_s"]}
        for row in decode.measure(jobs, on_point)
    ]


def _prefills(scope: CalibrationScope, configs: Sequence[EngineConfig], on_point: Callable[[Row], None]) -> list[Row]:
    jobs = [prefill.PrefillJob(config, scope.prompts, scope.prefill_repeats) for config in configs]
    return [
        row | {"work": "prefill", "tokens": row["prompt"], "chunk": row["chunk_tokens"], "seconds": row["prefill_s"]}
        for row in prefill.measure(jobs, on_point)
    ]
