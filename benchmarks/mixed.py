"""One long prompt among chats, live: what chunk sizes and policies do to its prefill and to the chats.

Chats decode when the long prompt comes, and short prompts come while it is computed. For each setting: the seconds of
the long prefill, and how many more these are than those of the same prompt alone in the largest chunks, beside the
seconds that the chats' steps take without it; the time between the chats' tokens meanwhile; the time to the first token
of the short prompts.

    python benchmarks/mixed.py [--prompt 16000] [--chats 8] [--chunks auto 16 64 256 512 1024] [--policies lars fcfs]
        [--short-every 1.5]
"""

import argparse
import math
import random
import statistics
import time
from dataclasses import dataclass, field

from longhelix import LLM, SamplingParams
from longhelix.measure.bench.environment import environment

SHORT_TOKENS, CHAT_TOKENS, WARM_STEPS = 200, 200, 100
ALONE_CHUNK_TOKENS = 2048
ANSWER = SamplingParams(max_new_tokens=4000, ignore_eos=True)


@dataclass
class Run:
    """What was seen between the coming of the long prompt and its first token."""

    prefill_s: float = 0.0
    decode_s: float = 0.0  # of a step of the chats alone
    gaps_s: list[float] = field(default_factory=list)  # between tokens of chats
    ttft_s: list[float] = field(default_factory=list)  # of short prompts

    def row(self, name: str, alone_s: float, num_chats: int) -> str:
        gaps_ms, ttft_s = sorted(1e3 * gap for gap in self.gaps_s), sorted(self.ttft_s)
        most_s = ttft_s[-1] if ttft_s else 0.0
        percentiles = [gaps_ms[int(share * (len(gaps_ms) - 1))] for share in (0.5, 0.95, 1.0)]
        gaps = " | ".join(f"{gap:.0f}" for gap in percentiles)
        median_s = ttft_s[len(ttft_s) // 2] if ttft_s else 0.0
        own_s = self.decode_s * len(gaps_ms) / max(num_chats, 1)
        seconds = f"{self.prefill_s:.1f} | {self.prefill_s - alone_s:.1f} | {own_s:.1f}"
        return f"| {name} | {seconds} | {gaps} | {len(ttft_s)} | {median_s:.2f} | {most_s:.2f} |"


def token_ids(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(1000, 40_000) for _ in range(count)]


def measured(
    model: str, chunk: int | str, policy: str, prompt_tokens: int, num_chats: int, short_every_s: float
) -> Run:
    """One engine, from its start to the long prompt's first token; no short prompts where they come every 0 s."""
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
        steps_s: list[float] = []
        while num_chats and len(steps_s) < WARM_STEPS:
            step_began_s = time.monotonic()
            llm.step()
            steps_s.append(time.monotonic() - step_began_s)
        run.decode_s = statistics.median(steps_s[WARM_STEPS // 2 :]) if steps_s else 0.0
        began_s = time.monotonic()
        long = llm.add(token_ids(chance, prompt_tokens), SamplingParams(max_new_tokens=1))
        last_s: dict[int, float] = {}
        came_s: dict[int, float] = {}
        next_s = began_s + (short_every_s or math.inf)
        while not run.prefill_s:
            if time.monotonic() >= next_s:
                short = llm.add(token_ids(chance, SHORT_TOKENS), SamplingParams(max_new_tokens=2, ignore_eos=True))
                came_s[short], next_s = time.monotonic(), next_s + short_every_s
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
    parser.add_argument("--short-every", type=float, default=1.5, help="seconds; 0 for no short prompts")
    arguments = parser.parse_args()
    conditions = environment("")
    short = f", and one of {SHORT_TOKENS} every {arguments.short_every} s" if arguments.short_every else ""
    alone_s = measured(arguments.model, ALONE_CHUNK_TOKENS, "lars", arguments.prompt, 0, 0).prefill_s
    print(
        f"{conditions['cpu']}, {conditions['instruction_set']}, commit {conditions['commit']}, load averages before "
        f"{conditions['load_average']}; {arguments.model}, one rank with all cores; {arguments.chats} chats decode, a "
        f"prompt of {arguments.prompt} tokens comes{short}. Alone, in chunks of {ALONE_CHUNK_TOKENS}, the prompt takes "
        f"{alone_s:.1f} s.\n"
    )
    print(
        "| policy, chunk | long prefill, s | lost, s | chats' own, s | chats' TBT, ms, p50 | p95 | most "
        "| short prompts | TTFT, s, p50 | most |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|", flush=True)
    for policy in arguments.policies:
        for chunk in arguments.chunks:
            size = chunk if chunk == "auto" else int(chunk)
            run = measured(arguments.model, size, policy, arguments.prompt, arguments.chats, arguments.short_every)
            print(run.row(f"{policy}, {chunk}", alone_s, arguments.chats), flush=True)


if __name__ == "__main__":
    main()
