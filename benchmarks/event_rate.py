"""What the server's own process spends on a token: streams of a model whose steps cost next to nothing.

python benchmarks/event_rate.py [--streams 1 16 64] [--new-tokens 256] [--repeats 5]

Processor time is that of the event loop's thread, and of all others of the process, the engine's among them; ranks and
the client have processes of their own, on the same cores.
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
from million import VOCAB, make_model
from serving import Turn, over_http, served

from longhelix.measure.bench.environment import environment

PROMPT_TOKENS = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    print(environment(time.strftime("%Y-%m-%d")))
    print(f"one layer with one head of 64; prompts of {PROMPT_TOKENS} tokens, {given.new_tokens} new ones\n")
    print("| streams | tokens/s, median | event loop, us a token | rest of the process |")
    print("|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), 2048, None)
        with served({"model": folder, "max_model_len": 2048}) as (url, server):
            for streams in given.streams:
                _turn(url, streams, given.new_tokens)
                before = _spent_s(server)
                turns = [_turn(url, streams, given.new_tokens) for _ in range(given.repeats)]
                tokens = [sum(map(len, turn.times_s)) for turn in turns]
                loop, rest = (1e6 * (b - a) / sum(tokens) for a, b in zip(before, _spent_s(server), strict=True))
                rate = statistics.median(count / turn.took_s for count, turn in zip(tokens, turns, strict=True))
                print(f"| {streams} | {rate:.0f} | {loop:.0f} | {rest:.0f} |", flush=True)
    return 0


def _turn(url: str, streams: int, new_tokens: int) -> Turn:
    return over_http(url, [random.choices(range(VOCAB), k=PROMPT_TOKENS) for _ in range(streams)], new_tokens)


def _spent_s(server: psutil.Process) -> tuple[float, float]:
    """By the main thread, which the event loop has, and by all others."""
    spent_s = {thread.id: thread.user_time + thread.system_time for thread in server.threads()}
    return spent_s[server.pid], sum(spent_s.values()) - spent_s[server.pid]


if __name__ == "__main__":
    sys.exit(main())
