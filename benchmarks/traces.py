"""Writes traces of production incidents of 2026, drawn from the numbers in public threads.

    python benchmarks/traces.py FOLDER

Each trace is a CSV file for `longhelix simulate --trace` and `benchmarks/replay.py`.
"""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

SEED = 1
HEADER = ("arrival_s", "prompt_tokens", "output_tokens", "session", "think_s")

Row = tuple[float, int, int, str, float | str]


def write(folder: Path) -> None:
    """Write all traces into a folder, which is created if needed. The same ones each time."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (
        ("long-clients", [*ordinary(2.0, 3000), *long_clients(22, 0)]),
        ("long-clients-apart", [*ordinary(2.0, 3000), *long_clients(12, 300)]),
        ("long-clients-live", [*ordinary(2.0, 180, 100), *long_clients(12, 0, 100, 12.0)]),
        ("decode-starvation", steady(360, 600)),
        ("long-medians", medians(0.1, 3600)),
    ):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(HEADER)
            writer.writerows(sorted(rows, key=lambda row: row[0]))


def poisson(random: np.random.Generator, rate_rps: float, until_s: float) -> Iterator[float]:
    now_s = random.exponential(1 / rate_rps)
    while now_s < until_s:
        yield round(now_s, 3)
        now_s += random.exponential(1 / rate_rps)


def between(random: np.random.Generator, least: int, most: int) -> int:
    """Draw an integer whose logarithm is uniformly distributed."""
    return round(float(np.exp(random.uniform(np.log(least), np.log(most)))))


def ordinary(rate_rps: float, until_s: float, smaller: int = 1) -> Iterator[Row]:
    """Ordinary requests. Assumed: prompts of 500 to 32K tokens and answers of 50 to 500.

    Args:
        rate_rps: mean arrival rate.
        until_s: duration of the trace.
        smaller: divides the prompt tokens; its square root divides the tokens of the answers.
    """
    random = np.random.default_rng(SEED)
    answers = round(smaller**0.5)
    for arrival_s in poisson(random, rate_rps, until_s):
        prompt, answer = between(random, 500, 32_000), between(random, 50, 500)
        yield arrival_s, max(prompt // smaller, 1), max(answer // answers, 1), "", ""


def long_clients(count: int, think_s: float, smaller: int = 1, every_s: float = 90.0) -> Iterator[Row]:
    """Two clients with prompts of 642K to 912K tokens, 90 s apart (SGLang pull requests 34554 and 34623).

    Args:
        count: number of prompts.
        think_s: time from the end of a client's request to its next one.
        smaller: as in `ordinary`.
        every_s: time between two prompts.
    """
    random = np.random.default_rng(SEED)
    answer = 200 // round(smaller**0.5)
    for index in range(count):
        prompt = int(random.integers(642_000, 912_001)) // smaller
        yield every_s * index, prompt, answer, f"long-{index % 2}", think_s


def steady(per_minute: float, until_s: float) -> Iterator[Row]:
    """Requests of 3K to 6K tokens (SGLang issue 32549: 360 per minute). Assumed: answers of 100 to 600."""
    random = np.random.default_rng(SEED)
    for arrival_s in poisson(random, per_minute / 60, until_s):
        yield arrival_s, int(random.integers(3000, 6001)), between(random, 100, 600), "", ""


def medians(rate_rps: float, until_s: float) -> Iterator[Row]:
    """Prompts with medians of 100K to 180K tokens (vLLM issue 57413). Assumed: log-normal, one in four is a chat."""
    random = np.random.default_rng(SEED)
    for arrival_s in poisson(random, rate_rps, until_s):
        short = random.random() < 0.25
        median = 1020 if short else random.uniform(100_000, 180_000)
        drawn = median * np.exp(0.5 * random.normal())
        yield arrival_s, min(max(round(float(drawn)), 100), 1_000_000), between(random, 50, 500), "", ""


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(Path(sys.argv[1]))
