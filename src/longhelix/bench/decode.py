"""Decode: one step of one long request, its KV filled with random numbers instead of by a prefill."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from longhelix.bench import memory
from longhelix.bench.clock import Clock
from longhelix.bench.measure import forget_peak, interleave, resident_bytes, seconds
from longhelix.bench.model import LongRequests, RankModel
from longhelix.bench.section import Column, Plot, Section
from longhelix.bench.world import Row, collect
from longhelix.runner.config import EngineConfig
from longhelix.spec import number_format

COLUMNS = (
    Column("context", "context", ",d"),
    Column("weight_dtype", "weights"),
    Column("kv_dtype", "KV"),
    Column("layout", "kvp x tpa"),
    Column("threads", "threads", "d"),
    Column("execution", "layers"),
    Column("step_s", "step, ms", ".2f", 1e3),
    Column("spread", "spread, %", ".0f", 100),
    Column("read_bytes", "read, MB", ",.0f", 1e-6),
    Column("bytes_per_s", "GB/s", ".1f", 1e-9),
    Column("memory_bytes_per_s", "memory, GB/s", ".1f", 1e-9),
    Column("fraction", "fraction", ".2f"),
    Column("native_s", "native, ms", ".2f", 1e3),
    Column("outside_s", "overhead, ms", ".2f", 1e3),
    Column("peak_rss_bytes", "peak RSS, MB", ",.0f", 1e-6),
    Column("formula_bytes", "formula, MB", ",.0f", 1e-6),
)
NOTE = (
    "One step of one request whose KV holds random numbers: the model on all ranks and sampling, without scheduler and "
    "sockets. read: weights and KV by formula, of all ranks. memory: the read kernel in turn with the steps. fraction: "
    "GB/s over memory. native: inside native calls, collectives included; overhead: outside of them; means of other "
    "steps, timed apart. peak RSS: while it decodes, beyond what the process had before loading, of the fullest rank; "
    "formula: its weights and KV."
)


class DecodeJob(msgspec.Struct, frozen=True, tag=True):
    """What every rank measures: a step at each context, ascending."""

    config: EngineConfig
    contexts: tuple[int, ...]
    repeats: int

    def measure(self, rank: int, directory: Path) -> Iterator[Row]:
        start_bytes = resident_bytes()
        model = RankModel(self.config, rank, directory)
        for context in self.contexts:
            yield self._point(model, context, start_bytes)

    def _point(self, model: RankModel, context: int, start_bytes: int) -> Row:
        config, rank = self.config, model.mesh.rank
        forget_peak()
        request = LongRequests(model, context)
        request.step()
        peak_rss_bytes = resident_bytes(peak=True) - start_bytes
        buffer_bytes = memory.READ_BYTES // config.layout.world_size
        timings = interleave({"step": request.step, "read": memory.reader(buffer_bytes)}, self.repeats)
        with Clock() as clock:
            total_s = sum(seconds(request.step) for _ in range(self.repeats))
        parts = clock.parts(total_s, self.repeats)
        kv_bytes = model.local_length(context) * config.kv_bytes_per_token(rank)
        weights_bytes = config.weight_elements(rank) * number_format(config.weight_dtype).weight_bytes
        return {
            "context": context,
            **timings["step"].row("step_s"),
            **parts,
            "native_s": total_s / self.repeats - parts["outside_s"],
            "read_bytes": config.weight_bytes_read(rank) + kv_bytes,
            "memory_bytes_per_s": buffer_bytes / timings["read"].median_s,
            "peak_rss_bytes": peak_rss_bytes,
            "formula_bytes": int(weights_bytes) + kv_bytes,
        }


def section(jobs: Sequence[DecodeJob], on_point: Callable[[Row], None]) -> Section:
    """Run each job on ranks of its own."""
    rows = []
    for job in jobs:
        points = collect(job, job.config.layout.world_size, on_point)
        rows += [conditions(job.config) | combine(ranks) for ranks in points]
    plot = Plot(("step_s",), ("layout", "weight_dtype", "kv_dtype"), x="context")
    return Section("decode", "Decode", NOTE, COLUMNS, rows, plot)


def conditions(config: EngineConfig) -> Row:
    """What the rows of one run of a model have in common."""
    return {
        "weight_dtype": config.weight_dtype,
        "kv_dtype": config.kv_dtype,
        "layout": f"{config.layout.kvp} x {config.layout.tpa}",
        "ranks": config.layout.world_size,
        "threads": config.threads_per_rank,
        "execution": config.execution,
    }


def combine(ranks: list[Row]) -> Row:
    """One row of all ranks': rank 0's times, everybody's bytes, the fullest rank's memory."""
    total = {name: sum(row[name] for row in ranks) for name in ("read_bytes", "memory_bytes_per_s")}
    fullest = max(ranks, key=lambda row: row["peak_rss_bytes"])
    bytes_per_s = total["read_bytes"] / ranks[0]["step_s"]
    return {
        **ranks[0],
        **total,
        "bytes_per_s": bytes_per_s,
        "fraction": bytes_per_s / total["memory_bytes_per_s"],
        "peak_rss_bytes": fullest["peak_rss_bytes"],
        "formula_bytes": fullest["formula_bytes"],
    }
