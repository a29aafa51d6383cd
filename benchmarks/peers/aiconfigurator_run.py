"""aiconfigurator on one question: its aggregated search on GB200 at a long context, from the files that it writes.

Its kernel tables end far below a million tokens, so it is asked for its speed-of-light mode, in which every operator
takes what the data sheet allows. It knows no FP4 KV: weights and KV are those of the checkpoint that it picks.
"""

import argparse
import contextlib
import csv
import io
import json
import tempfile
import time
from importlib.metadata import version
from pathlib import Path


def search(model: str, gpus: int, context: int, folder: str) -> None:
    """Run the command line, which prints a great deal."""
    from aiconfigurator.main import main

    arguments = [
        "cli", "default", "--model-path", model, "--system", "gb200", "--total-gpus", str(gpus), "--isl", str(context),
        "--osl", "8", "--tpot", "1000", "--ttft", "10000000", "--backend", "trtllm", "--serving-mode", "agg",
        "--database-mode", "SOL", "--save-dir", folder, "--no-color", "--log-level", "CRITICAL",
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        main(arguments)


def points(folder: str) -> list[dict[str, str]]:
    return [row for path in Path(folder).rglob("pareto.csv") for row in csv.DictReader(path.open())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="deepseek-ai/DeepSeek-V3")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--context", type=int, default=1_000_000)
    asked = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        search(asked.model, asked.gpus, asked.context, folder)
        found = points(folder)
    best = max(found, key=lambda row: float(row["tokens/s/user"]), default=None)
    point = {
        "peer": "aiconfigurator",
        "version": version("aiconfigurator"),
        "seconds": time.perf_counter() - start,
        "points": len(found),
        "user_tokens_per_s": best and float(best["tokens/s/user"]),
        "layout": best and best["parallel"],
        "memory_gb": best and float(best["memory"]),
    }
    print(json.dumps(point))


if __name__ == "__main__":
    main()
