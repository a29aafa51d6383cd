"""One long prompt among chats, live: what chunk sizes and policies do to its prefill and to the chats.

Chats decode when the long prompt comes, and short prompts come while it is computed. For each setting: the seconds of
the long prefill, the time between the chats' tokens meanwhile, the time to the first token of the short prompts.

    python benchmarks/mixed.py [--prompt 16000] [--chats 8] [--chunks auto 16 64 256 512 1024] [--policies lars fcfs]
"""

import argparse
import random
import time
from dataclasses import dataclass, field

from longhelix import LLM, SamplingParams, ServiceLevel
from longhelix.bench.environment import environment

SHORT_TOKENS, SHORT_EVERY_S, CHAT_TOKENS = 200, 1.5, 200
ANSWER = SamplingParams(max_new_tokens=4000, ignore_eos=True)


@dataclass
class Run:
    """What was seen between the coming of the long prompt and its first token."""

    prefill_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)  # between tokens of chats
    ttft_s: list[float] = field(default_factory=list)  # of short prompts

    def row(self, name: str) -> str:
        gaps_ms, ttft_s = sorted(1e3 * gap for gap in self.gaps_s), sorted(self.ttft_s)
        most_s = ttft_s[-1] if ttft_s else 0.0
        percentiles = [gaps_ms[int(share * (len(gaps_ms) - 1))] for share in (0.5, 0.95, 1.0)]
        gaps = " | ".join(f"{gap:.0f}" for gap in percentiles)
        median_s = ttft_s[len(ttft_s) // 2] if ttft_s else 0.0
        return f"| {name} | {self.prefill_s:.1f} | {gaps} | {len(ttft_s)} | {median_s:.2f} | {most_s:.2f} |"


def token_ids(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(1000, 40_000) for _ in range(count)]


def measured(model: str, chunk: int | str, policy: str, prompt_tokens: int, num_chats: int) -> Run:
    """One engine, from its start to the long prompt's first token."""
    chance, run = random.Random(0), Run()
    pool_tokens = prompt_tokens + 40 * 4500
    with LLM(
        model,
        max_model_len=prompt_tokens + ANSWER.max_new_tokens,
        kv_cache_tokens=pool_tokens,
        chunk_tokens=chunk,
        policy=policy,
        prefix_cache=False,
    ) as llm:
        chats = {llm.add(token_ids(chance, CHAT_TOKENS), ANSWER) for _ in range(num_chats)}
        for _ in range(100):
            llm.step()
        began_s = time.monotonic()
        long = llm.add(token_ids(chance, prompt_tokens), SamplingParams(max_new_tokens=1), ServiceLevel(ttft_slo_s=600))
        last_s: dict[int, float] = {}
        came_s: dict[int, float] = {}
        next_s = began_s + SHORT_EVERY_S
        while not run.prefill_s:
            if time.monotonic() >= next_s:
                short = llm.add(token_ids(chance, SHORT_TOKENS), SamplingParams(max_new_tokens=2, ignore_eos=True))
                came_s[short], next_s = time.monotonic(), next_s + SHORT_EVERY_S
            for delta in llm.step():
                now_s = time.monotonic()
                if delta.request_id == long:
                    run.prefill_s = now_s - began_s
                elif delta.request_id in chats:
                    if delta.request_id in last_s:
                        run.gaps_s.append(now_s - last_s[delta.request_id])
                    last_s[delta.request_id] = now_s
                elif delta.request_id in came_s:
                    run.ttft_s.append(now_s - came_s.pop(delta.request_id))
        run.ttft_s += [time.monotonic() - since_s for since_s in came_s.values()]  # at least
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--prompt", type=int, default=16_000)
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--chunks", nargs="+", default=["auto", "16", "64", "256", "512", "1024"])
    parser.add_argument("--policies", nargs="+", default=["lars"])
    arguments = parser.parse_args()
    conditions = environment("")
    print(
        f"{conditions['cpu']}, {conditions['instruction_set']}, commit {conditions['commit']}, load averages before "
        f"{conditions['load_average']}; {arguments.model}, one rank with all cores; {arguments.chats} chats decode, a "
        f"prompt of {arguments.prompt} tokens comes, and one of {SHORT_TOKENS} every {SHORT_EVERY_S} s.\n"
    )
    print(
        "| policy, chunk | long prefill, s | chats' TBT, ms, p50 | p95 | most | short prompts | TTFT, s, p50 | most |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    for policy in arguments.policies:
        for chunk in arguments.chunks:
            size = chunk if chunk == "auto" else int(chunk)
            run = measured(arguments.model, size, policy, arguments.prompt, arguments.chats)
            print(run.row(f"{policy}, {chunk}"), flush=True)


if __name__ == "__main__":
    main()
