"""Measures a decode step of one long request with random KV."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from longhelix.compute.runner.config import EngineConfig
from longhelix.measure import memory
from longhelix.measure.clock import Clock
from longhelix.measure.hosts import MeasuringHosts
from longhelix.measure.model import LongRequests, RankModel
from longhelix.measure.timing import forget_peak, interleave, resident_bytes, seconds
from longhelix.measure.world import Row, collect


class DecodeJob(msgspec.Struct, frozen=True):
    """Job of every rank: measures a decode step at each context."""

    config: EngineConfig
    contexts: tuple[int, ...]  # numbers of tokens, ascending
    repeats: int  # number of measured steps, after a warm-up

    def measure(self, rank: int, directory: Path) -> Iterator[Row]:
        start_bytes = resident_bytes()
        model = RankModel.join(self.config, rank, directory)
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
        kinds = clock.mean(total_s, self.repeats)
        kv_bytes = config.kv_bytes(rank, model.local_length(context))
        return {
            "context": context,
            **timings["step"].row("step_s"),
            **kinds,
            "native_s": total_s / self.repeats - kinds["outside_s"],
            "read_bytes": config.weight_bytes_read(rank) + kv_bytes,
            "memory_bytes_per_s": buffer_bytes / timings["read"].median_s,
            "peak_rss_bytes": peak_rss_bytes,
            "formula_bytes": config.weight_bytes(rank) + kv_bytes,
        }


def measure(
    jobs: Sequence[DecodeJob], on_point: Callable[[Row], None], hosts: MeasuringHosts | None = None
) -> list[Row]:
    """Run each job in new rank processes. Returns a row for each context of each job."""
    rows = []
    for job in jobs:
        points = collect(job, job.config.layout.world_size, on_point, hosts=hosts)
        rows += [conditions(job.config) | combine(ranks) for ranks in points]
    return rows


def conditions(config: EngineConfig) -> Row:
    """Columns that describe the configuration of a measurement."""
    return {
        "weight_dtype": config.weight_formats,
        "activation_dtype": config.formats.activation_dtype or "",
        "kv_dtype": config.formats.kv_dtype,
        "attention_dtype": config.formats.attention_dtype or "",
        "layout": f"{config.layout.kvp} x {config.layout.tpa}",
        "ranks": config.layout.world_size,
        "threads": config.machines.threads_of(0),
        "execution": config.execution.mode,
    }


def combine(ranks: list[Row]) -> Row:
    """Combine the rows of all ranks into one row.

    The row has the times of rank 0, the bytes read by all ranks together, and the memory use of the fullest rank.
    """
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
