"""Replays a trace of requests on a running engine, once for each policy.

Prompts consist of random tokens. Long prompts have more than --long tokens; long waits take more than --wait seconds.

    python benchmarks/traces.py /tmp/traces
    python benchmarks/replay.py --trace /tmp/traces/long-clients-live.csv [--settings lars:auto fcfs:1024]
"""

import argparse
import random
import time
from pathlib import Path

from longhelix import LLM, SamplingParams
from longhelix.engine.result import Result
from longhelix.measure.bench.environment import environment
from longhelix.scheduler.request import ANY_SERVICE
from longhelix.simulate.arrival import Arrival
from longhelix.simulate.arrivals import Arrivals
from longhelix.simulate.trace import read_csv

ROW = "| {} | {:.0f} | {} | {:.2f} | {:.2f} | {:.2f} | {:.1%} | {} | {:.1f} | {:.1f} | {:.2f} | {:.2f} |"
HEAD = (
    "| policy, chunk | took, s | short | TTFT, s, p50 | p99 | most | over the wait | long | TTFT, s, mean | most | "
    "a token, s, p99 | most |"
)


def served(llm: LLM, arrivals: Arrivals) -> list[Result]:
    """Send each request at its time, or after the last one of its session has ended, and return all results."""
    chance, results, sent = random.Random(0), list[Result](), dict[int, Arrival]()
    began_s = time.monotonic()
    while sent or arrivals.next_s is not None:
        while (arrival := arrivals.take(time.monotonic() - began_s)) is not None:
            token_ids = [chance.randrange(1000, 40_000) for _ in range(arrival.prompt_tokens)]
            answer = SamplingParams(max_new_tokens=arrival.output_tokens, ignore_eos=True)
            sent[llm.add(token_ids, answer, arrival.service)] = arrival
        if not sent:
            time.sleep(max(began_s + (arrivals.next_s or 0.0) - time.monotonic(), 0.0))
            continue
        for delta in llm.step():
            if delta.result is not None:
                results.append(delta.result)
                arrivals.ended(sent.pop(delta.request_id), time.monotonic() - began_s)
    return results


def row(name: str, results: list[Result], long_tokens: int, wait_s: float, took_s: float) -> str:
    short = sorted(result.ttft_s or 0.0 for result in results if result.prompt_tokens <= long_tokens)
    long = [result.ttft_s or 0.0 for result in results if result.prompt_tokens > long_tokens]
    gaps = sorted(gap for result in results for gap in result.tbt_s)
    over = sum(ttft_s > wait_s for ttft_s in short) / len(short)
    return ROW.format(
        name,
        took_s,
        len(short),
        *(_percentile(short, percent) for percent in (50, 99, 100)),
        over,
        len(long),
        sum(long) / max(len(long), 1),
        max(long, default=0.0),
        _percentile(gaps, 99),
        gaps[-1],
    )


def _percentile(values: list[float], percent: int) -> float:
    return values[max(-(-percent * len(values) // 100), 1) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--settings", nargs="+", default=["lars:auto", "fcfs:1024"], help="POLICY:CHUNK_TOKENS")
    parser.add_argument("--kv-cache-tokens", type=int, default=65_536)
    parser.add_argument("--long", type=int, default=1000)
    parser.add_argument("--wait", type=float, default=5.0)
    arguments = parser.parse_args()
    with arguments.trace.open(newline="") as lines:
        workload = read_csv(lines, ANY_SERVICE)
    conditions = environment("")
    print(
        f"{conditions['cpu']}, {conditions['instruction_set']}, commit {conditions['commit']}, load averages before "
        f"{conditions['load_average']}; {arguments.model}, one rank with all cores; {arguments.trace.name}, "
        f"{len(workload)} requests, KV of {arguments.kv_cache_tokens} tokens. "
        f"Long: above {arguments.long} tokens. A wait: {arguments.wait} s.\n"
    )
    print(f"{HEAD}\n|---|{'--:|' * 11}", flush=True)
    longest = max(arrival.prompt_tokens + arrival.output_tokens for arrival in workload)
    for setting in arguments.settings:
        policy, _, chunk = setting.partition(":")
        with LLM(
            arguments.model,
            max_model_len=longest,
            kv_cache_tokens=arguments.kv_cache_tokens,
            chunk_tokens=chunk if chunk == "auto" else int(chunk),
            policy=policy,
            prefix_cache=False,
        ) as llm:
            began_s = time.monotonic()
            results = served(llm, Arrivals(workload))
            took_s = time.monotonic() - began_s
        print(row(setting.replace(":", ", "), results, arguments.long, arguments.wait, took_s), flush=True)


if __name__ == "__main__":
    main()
