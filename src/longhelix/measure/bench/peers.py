"""Measures other engines and planners (peers). Each peer is a separate program in benchmarks/peers.

Most peers run in their own virtual environment.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from longhelix.compute.machine import host
from longhelix.compute.runner.config import EngineConfig
from longhelix.compute.runner.pool_size import kv_bytes_per_token
from longhelix.engine.workers.environment import rank_environment
from longhelix.measure.bench.section import Column, Plot, Section
from longhelix.measure.world import Row
from longhelix.spec.layout import Layout

PROGRAMS = Path(__file__).parents[4] / "benchmarks" / "peers"  # exists only in a checkout, not in an installed package
TIMEOUT_S = 1800.0
# Peers store KV in bfloat16 or float32, and some peers copy the KV while they fill the cache.
_COPIES = 3


@dataclass(frozen=True)
class Peer:
    """Another engine or planner that the benchmarks can measure."""

    name: str
    program: str  # file name in PROGRAMS
    environment: str | None  # name of its virtual environment; None for the current one
    package: str  # Python package that the program imports


MODELS = (
    Peer("openvino-genai", "openvino_run.py", "openvino", "openvino_genai"),
    Peer("llama.cpp", "llama_cpp_run.py", "llama-cpp", "llama_cpp"),
    Peer("transformers", "transformers_run.py", None, "transformers"),
)
PLANNERS = (
    Peer("aiconfigurator", "aiconfigurator_run.py", "aiconfigurator", "aiconfigurator"),
    Peer("genz-llm", "genz_run.py", "genz", "GenZ"),
)
ATTENTION = Peer("torch", "torch_attention.py", None, "torch")

ATTENTION_SHAPES = ("smollm2-135m", "llama-3.1-8b", "deepseek-v2-lite")

ATTENTION_COLUMNS = (
    Column("shape", "shape"),
    Column("heads", "query heads", "d"),
    Column("kv_heads", "KV heads", "d"),
    Column("head_size", "head size", "d"),
    Column("kv", "KV"),
    Column("context", "context", ",d"),
    Column("threads", "threads", "d"),
    Column("form", "torch op"),
    Column("step_s", "time, ms", ".2f", 1e3),
    Column("kv_gb_per_s", "GB/s", ".1f"),
    Column("read_gb_per_s", "torch reads, GB/s", ".1f"),
)
_SIDE = (
    Column("program", "program"),
    Column("weights", "weights"),
    Column("kv", "KV"),
    Column("context", "context", ",d"),
    Column("threads", "threads", "d"),
)
SIDE_COLUMNS = {
    "decode": (*_SIDE, Column("time_s", "step, ms", ".2f", 1e3), Column("relative", "time vs longhelix", ".2f")),
    "prefill": (*_SIDE, Column("tokens_per_s", "tokens/s", ",.0f"), Column("relative", "time vs longhelix", ".2f")),
}
SIDE_NOTE = (
    "Each program runs the same model on all cores. Peers run after longhelix, not in turn with longhelix. Times are "
    "relative to the first row of longhelix at the same context. Compare only rows with the same formats of weights "
    "and KV."
)


@dataclass
class Peers:
    """The peers that are installed on this machine."""

    directory: Path  # folder of the peers' virtual environments
    remarks: list[str] = field(default_factory=list)  # one sentence for each peer that is missing or has failed

    def attention(self, context: int, threads: Sequence[int]) -> list[Section]:
        """Measure decode attention of torch over the KV of `context` tokens."""
        options = ["--shapes", *ATTENTION_SHAPES, "--contexts", str(context), "--threads", *map(str, threads)]
        rows = self.points(ATTENTION, options)
        note = "Decode attention with each suitable operation of torch. See benchmarks/peers/README.md."
        return (
            [Section(name="kernels_torch", title="Attention by torch", note=note, columns=ATTENTION_COLUMNS, rows=rows)]
            if rows
            else []
        )

    def models(self, what: str, config: EngineConfig, contexts: Sequence[int], ours: Sequence[Row]) -> list[Section]:
        """Measure prefill or decode (`what`) of the same GGUF file with each peer, and compare with `ours`."""
        rows = [row for peer in MODELS for row in self._model(peer, what, config, contexts)]
        if not rows:
            return []
        columns = SIDE_COLUMNS[what]
        plot = Plot((columns[-2].key,), ("program", "weights", "kv"), x="context")
        title = f"{what.capitalize()}, compared with peers"
        return [
            Section(
                name=f"{what}_peers",
                title=title,
                note=SIDE_NOTE,
                columns=columns,
                rows=with_relative_times([*map(own, ours), *rows]),
                plot=plot,
            )
        ]

    def _model(self, peer: Peer, what: str, config: EngineConfig, contexts: Sequence[int]) -> list[Row]:
        if not config.model_path.endswith(".gguf"):
            self.remarks.append(
                f"{peer.name} was left out: peers need a GGUF file, and {config.model_path} is not a GGUF file."
            )
            return []
        fitting = [context for context in contexts if _fits(config, context)]
        if len(fitting) < len(contexts):
            self.remarks.append(f"{peer.name} was left out at {max(contexts)} tokens: the KV does not fit in memory.")
        if not fitting:
            return []
        threads = config.machines.threads_of(0) * config.layout.world_size
        options = [config.model_path, f"--{what}", "--contexts", *map(str, fitting), "--threads", str(threads)]
        return [peer_row(point) for point in self.points(peer, [*options, "--repeats", "1"])]

    def points(self, peer: Peer, options: list[str]) -> list[Row]:
        """Run a peer and return its points. If the peer is missing or fails, add a remark and return an empty list."""
        python = sys.executable if peer.environment is None else str(self.directory / peer.environment / "bin/python")
        program = PROGRAMS / peer.program
        missing = peer.environment is None and importlib.util.find_spec(peer.package) is None
        if missing or not program.exists() or not Path(python).exists():
            where = "this installation" if peer.environment is None else self.directory / peer.environment
            self.remarks.append(
                f"{peer.name} was left out: it is not installed in {where} (see benchmarks/peers/install.sh)."
            )
            return []
        try:
            done = subprocess.run(
                [python, str(program), *options],
                capture_output=True,
                text=True,
                stdin=subprocess.DEVNULL,
                env=rank_environment(),
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            self.remarks.append(f"{peer.name} was left out: it took more than {TIMEOUT_S:.0f} s.")
            return []
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            self.remarks.append(f"{peer.name} failed: {lines[-1]}")
            return []
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def peer_row(point: Row) -> Row:
    """Convert a point of a peer to a row. `time_s` is the time of one decode step or of the whole prompt."""
    speed = point["prefill_tokens_per_s"]
    return {
        "program": point["peer"],
        **{name: point[name] for name in ("version", "weights", "kv", "context", "threads")},
        "time_s": point["context"] / speed if speed else point["decode_s_per_token"],
        "tokens_per_s": speed,
    }


def own(row: Row) -> Row:
    """Convert a row of longhelix's own decode or prefill to a row of the peers' table."""
    is_decode = "step_s" in row
    return {
        "program": "longhelix",
        "weights": row["weight_dtype"],
        "kv": row["kv_dtype"],
        "context": row["context" if is_decode else "prompt"],
        "threads": row["threads"] * row["ranks"],
        "time_s": row["step_s" if is_decode else "prefill_s"],
        "tokens_per_s": row.get("tokens_per_s"),
    }


def with_relative_times(rows: Sequence[Row]) -> list[Row]:
    """Sort rows by context, and add each row's time relative to the first row of the same context (longhelix)."""
    first: dict[int, Row] = {}
    for row in rows:
        first.setdefault(row["context"], row)
    by_context = sorted(rows, key=lambda row: row["context"])
    return [row | {"relative": row["time_s"] / first[row["context"]]["time_s"]} for row in by_context]


def _fits(config: EngineConfig, context: int) -> bool:
    """True if _COPIES bfloat16 copies of the KV fit in free memory, because peers may need this much memory."""
    kv_bytes = context * kv_bytes_per_token(config.spec, Layout(), "bfloat16", "cpu", 0)
    return _COPIES * kv_bytes < host.available_bytes()
