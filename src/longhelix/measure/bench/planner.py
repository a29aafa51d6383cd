"""Measures the speed of longhelix's planner and of other planners.

It reports configurations per second, planning time, and import time.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence

from longhelix.engine.workers.environment import rank_environment
from longhelix.errors import UserError
from longhelix.measure.bench.peers import PLANNERS, Peers
from longhelix.measure.bench.section import Column, Section
from longhelix.measure.timing import Timing, seconds
from longhelix.measure.world import Row

COLUMNS = (
    Column("what", "benchmark"),
    Column("configurations", "configurations", ",d"),
    Column("time_s", "time, s", ".2f"),
    Column("spread", "spread, %", ".0f", 100),
    Column("per_s", "configurations/s", ",.0f"),
    Column("peak_bytes", "peak RSS, MB", ",.0f", 1e-6),
)
NOTE = (
    "DeepSeek-R1 in FP4 on GB200, at 1M tokens. sweep: one single-threaded process computes every layout of up to 128 "
    "GPUs at every batch size. Memory is unlimited, so that no configuration is skipped. peak RSS: memory use of this "
    "process. plan: `longhelix plan --json` with --max-gpus 64 and 1024, including process start-up. import: time to "
    "import longhelix.plan.answer, including numpy."
)
PEER_COLUMNS = (
    Column("peer", "planner"),
    Column("version", "version"),
    Column("seconds", "time, s", ".1f"),
    Column("points", "points", "d"),
    Column("user_tokens_per_s", "best tokens/s/user", ".1f"),
    Column("layout", "layout"),
    Column("memory_gb", "GB per GPU", ".1f"),
)
PEER_NOTE = (
    "Each planner gets the same question, as far as it supports the question (see benchmarks/peers/README.md): a model "
    "of the size of DeepSeek-V3 on 64 GB200 at 1M tokens. Each planner has its own hardware model, so compare the "
    "times but not tokens/s."
)
QUESTION = ("plan", "--model", "deepseek-r1", "--system", "gb200", "--context", "1M", "--json")
_TIMEOUT_S = 300
_SWEEP = """
import json, time
from dataclasses import replace
from longhelix.perf.setting import Dtypes, Setting
from longhelix.plan.space import space
from longhelix.plan.sweep import batches, sweep
from longhelix.spec.presets import load_model, load_system
model, system = load_model("deepseek-r1"), load_system("gb200").replaced({"memory_bytes": 1e18}, "assumed")
searched = space(model, 128)
start = time.perf_counter()
found = sweep(Setting(model, system, Dtypes("fp4", "fp4", "fp4")), searched, 1e6, batches())
took_s = time.perf_counter() - start
# VmHWM instead of ru_maxrss, which starts with the value of the parent process.
peak_bytes = 1024 * int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
print(json.dumps({"configurations": len(found.points), "time_s": took_s, "peak_bytes": peak_bytes}))
"""
_IMPORT = """
import json, time
start = time.perf_counter()
import longhelix.plan.answer
print(json.dumps({"time_s": time.perf_counter() - start}))
"""


def sections(repeats: int, peers: Peers | None, on_point: Callable[[Row], None]) -> list[Section]:
    """Measure longhelix's planner `repeats` times, and each installed peer once. Returns the tables."""
    rows = [_of("sweep", [_program(_SWEEP) for _ in range(repeats)])]
    rows.append(_of("plan", [_plan(64) for _ in range(repeats)]))
    rows.append(_of("plan of 1,024 GPUs", [_plan(1024) for _ in range(repeats)]))
    rows.append(_of("import", [_program(_IMPORT) for _ in range(repeats)]))
    for row in rows:
        on_point(row)
    found = [Section(name="planner", title="Planner", note=NOTE, columns=COLUMNS, rows=rows)]
    others = [row for planner in PLANNERS for row in peers.points(planner, [])] if peers else []
    if others:
        found.append(
            Section(
                name="planner_peers",
                title="Planner, compared with peers",
                note=PEER_NOTE,
                columns=PEER_COLUMNS,
                rows=[_own(), *others],
            )
        )
    return found


def _of(what: str, samples: Sequence[Row]) -> Row:
    """Return a row with the median time of repeated runs, and with the other values of the last run."""
    timing = Timing.of([row["time_s"] for row in samples])
    counted = {name: value for name, value in samples[-1].items() if name != "time_s"}
    row = {"what": what, **counted, **timing.row("time_s")}
    if "configurations" in row:
        row["per_s"] = row["configurations"] / timing.median_s
    return row


def _plan(max_gpus: int) -> Row:
    """Measure how long one plan takes, including process start-up."""
    found: dict[str, object] = {}
    took_s = seconds(lambda: found.update(_command(max_gpus)))
    return {"time_s": took_s}


def _own() -> Row:
    """Measure longhelix's planner, and return its row of the comparison table."""
    found: dict[str, object] = {}
    took_s = seconds(lambda: found.update(_command(64)))
    best = found["frontier"][-1]
    layout = best["layout"]
    return {
        "peer": "longhelix",
        "seconds": took_s,
        "points": len(found["frontier"]),
        "user_tokens_per_s": best["tokens_per_s_per_user"],
        "layout": f"KVP {layout['kvp']} x TPA {layout['tpa']}, TPF {layout['tpf']} x EP {layout['ep']}",
        "memory_gb": best["memory_bytes_per_gpu"] / 1e9,
    }


def _command(max_gpus: int) -> Row:
    return _json([sys.executable, "-m", "longhelix", *QUESTION, "--max-gpus", str(max_gpus)])


def _program(text: str) -> Row:
    return _json([sys.executable, "-c", text])


def _json(command: list[str]) -> Row:
    done = subprocess.run(command, capture_output=True, text=True, env=rank_environment(), timeout=_TIMEOUT_S)
    if done.returncode:
        raise UserError(f"a benchmark of the planner failed: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)
