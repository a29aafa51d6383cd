"""Whether a plan's answers hold: what it recommends for 30 questions, simulated by the engine's scheduler at its rate.

python benchmarks/answers.py [--requests 400] [--out benchmarks/answers.md]

Each question has a model, a system, prompts and answers of one length, a TTL and a TTFT. The answer's layout, batch and
chunk size serve requests that come at random (Poisson), at the rate of one replica; the 95th percentiles of the times
to the first token and from token to token are compared with the targets. Prefill and decode apart are not simulated,
nor are layouts of DP x KVP, which the engine has not.
"""

import argparse
import itertools
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from longhelix.engine.options import EngineOptions
from longhelix.engine.settings.scheduler import scheduler_config
from longhelix.measure.bench.environment import environment
from longhelix.perf.setting import Dtypes, Setting
from longhelix.plan.answer import answer
from longhelix.plan.candidate import in_words
from longhelix.plan.choice import Choice
from longhelix.plan.demand import Demand
from longhelix.plan.question import Question
from longhelix.plan.space import OVERLAPPED
from longhelix.scheduler.request import ANY_SERVICE, MOST_TOKENS
from longhelix.simulate.pool import with_pools
from longhelix.simulate.simulation import Server, simulate
from longhelix.simulate.synthetic import Component, Lengths, Synthetic
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_model, load_system

MODELS = ("deepseek-r1", "llama-3.1-405b", "llama-3-70b", "qwen3-235b-a22b", "llama-3-8b")
SYSTEMS = ("gb200", "b200", "h200")
# Prompt, answer, TTL and TTFT.
LENGTHS = ((32_768, 1024, 0.05, 10.0), (262_144, 1024, 0.1, 120.0))
MAX_GPUS = 64
HEAD = (
    "| model | system | prompt | TTL, ms | TTFT, s | recommended | GPUs | batch | chunk | requests/s "
    "| TTL beside a prompt, ms | TTFT, s | simulated TTL p95, ms | TTFT p95, s | holds |\n"
    "|---|---|--:|--:|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|---|"
)


@dataclass(frozen=True)
class Simulated:
    """95th percentiles."""

    ttl_s: float
    ttft_s: float


def simulated(question: Question, best: Choice, requests: int) -> Simulated:
    """One replica with its part of the rate."""
    demand, setting = question.demand, question.setting
    assert demand is not None
    assert best.rate_per_s is not None
    degrees = {name: int(best.layout[name]) for name in ("kvp", "tpa", "tpf", "ep", "pp", "ffn_replicas")}
    layout = Layout(**degrees)
    options = EngineOptions(
        policy="fcfs",
        chunk_tokens=best.chunk_tokens,
        placement=str(best.layout["placement"]),
        max_running=best.batch + layout.pp,
        prefix_cache=False,
    )
    config = scheduler_config(options, layout, MOST_TOKENS, setting)
    server = Server(setting, layout, with_pools(setting, layout, config), hop_b=best.strategy in OVERLAPPED)
    (kind,) = demand.kinds
    lengths = Component(1.0, *(Lengths(tokens, tokens) for tokens in (kind.input_tokens, kind.output_tokens)))
    outcome = simulate(server, Synthetic(requests, best.rate_per_s / best.replicas, (lengths,), ANY_SERVICE))
    ttl_s, ttft_s = outcome.tbt.percentile(95), outcome.ttft.percentile(95)
    assert outcome.finished == requests
    assert ttl_s is not None
    assert ttft_s is not None
    return Simulated(ttl_s, ttft_s)


def row(model: str, system: str, lengths: tuple[int, int, float, float], requests: int) -> tuple[str, bool]:
    prompt, output, ttl_s, ttft_s = lengths
    hardware = load_system(system)
    dtype = "fp4" if "fp4" in hardware.arithmetic.flops_per_s else "fp8"
    demand = Demand.of([(prompt, output)], None, 0.0)
    setting = Setting(load_model(model), hardware, Dtypes(dtype, dtype))
    question = Question(setting, demand.longest, MAX_GPUS, ttl_s, ttft_s, demand=demand)
    best = answer(question).best
    asked = f"| {model} | {system} | {prompt:,} | {1e3 * ttl_s:g} | {ttft_s:g} "
    if best is None:
        return f"{asked}| nothing meets these together | | | | | | | | | said so |", True
    if best.layout["dp"] != 1:
        return f"{asked}| {in_words(best.layout)}, which the engine has not | | | | | | | | | not run |", True
    found = simulated(question, best, requests)
    holds = found.ttl_s <= ttl_s and found.ttft_s <= ttft_s
    return (
        f"{asked}| {in_words(best.layout)} | {best.gpus} | {best.batch} | {best.chunk_tokens} | {best.rate_per_s:.3g} "
        f"| {1e3 * best.ttl_p95_s:.1f} | {best.ttft_s:.2f} | {1e3 * found.ttl_s:.1f} | {found.ttft_s:.2f} "
        f"| {'yes' if holds else 'NO'} |"
    ), holds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lines = [str(environment(time.strftime("%Y-%m-%d"))), "", f"{given.requests} requests each.", "", HEAD]
    print("\n".join(lines))
    kept = []
    for model, system, lengths in itertools.product(given.models, given.systems, LENGTHS):
        line, holds = row(model, system, lengths, given.requests)
        lines.append(line)
        kept.append(holds)
        print(line, flush=True)
    lines += ["", f"{sum(kept)} of {len(kept)} hold, or were said to have no answer."]
    print(lines[-1])
    if given.out is not None:
        given.out.write_text("\n".join(lines) + "\n")
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
