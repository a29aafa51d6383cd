"""Streams through HTTP beside the same through `LLM`, and through other servers: tokens a second, TTFT and TBT.

python benchmarks/serving.py [--streams 1 16 64] [--prompt-tokens 512] [--new-tokens 64] [--repeats 3]
    [--url NAME=http://127.0.0.1:8080 ...] [--openvino PYTHON --gguf FILE] [--tbt-target-s 0.7]
    [--set policy=fcfs activation-dtype=int8]

All take turns, each alone on the machine but for servers that wait, and once more at first to warm up. `--url`: another
server with completions as OpenAI has them, which is already up (llama.cpp: `llama-server -m FILE -c CONTEXT -np STREAMS
-t THREADS`). `--openvino`: the Python of an environment with openvino-genai, whose continuous batching runs in a
process of its own. Prompts are random tokens that no turn has seen before; answers go on after the end of text.
"""

import argparse
import json
import random
import re
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from longhelix import LLM, SamplingParams
from longhelix.measure.bench.environment import environment

CHOICES = re.compile(rb'"choices": ?\[ ?{')  # not parsed, which takes longer than all else
OPTIONS = {"max_model_len": 2048, "policy": "lars", "placement": "auto"}


@dataclass
class Turn:
    """When each stream got each of its tokens, in seconds after all were asked for; took_s: until the last one."""

    times_s: list[list[float]]
    took_s: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--url", nargs="*", default=[], metavar="NAME=URL")
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--gguf", type=Path)
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="OPTION=VALUE", help="of ours, besides what it has here"
    )
    parser.add_argument("--tbt-target-s", type=float, help="between two tokens of ours beside prompts")
    given = parser.parse_args()
    options: dict[str, object] = dict(OPTIONS)
    options |= {name.replace("-", "_"): value for name, _, value in (one.partition("=") for one in given.set)}
    if given.tbt_target_s:
        options["tbt_target_s"] = given.tbt_target_s
    print(environment(time.strftime("%Y-%m-%d")))
    print(f"prompts of {given.prompt_tokens} tokens, {given.new_tokens} new ones; medians of {given.repeats} turns")
    print(f"ours: {options}\n")
    print("| streams | through | tokens/s | TTFT p50, s | p95 | TBT p50, ms | p95 |")
    print("|--:|---|--:|--:|--:|--:|--:|")
    tokens = max(given.streams) * (given.prompt_tokens + given.new_tokens + 32)
    options |= {"model": "builtin", "kv_cache_tokens": tokens}
    with served(options) as (url, _), LLM(**options) as llm:
        sides: dict[str, Callable[[list[list[int]]], Turn]] = {
            "longhelix, LLM": lambda prompts: in_process(llm, prompts, given.new_tokens),
            "longhelix, HTTP": lambda prompts: over_http(url, prompts, given.new_tokens),
        }
        for one in given.url:
            name, _, other = one.partition("=")
            sides[name] = lambda prompts, other=other: over_http(other, prompts, given.new_tokens)
        if given.openvino:
            sides["OpenVINO"] = lambda prompts: by_openvino(given, prompts)
        chance = random.Random(time.time_ns())  # servers that are up may keep what another run has asked
        for streams in given.streams:
            turns: dict[str, list[Turn]] = {name: [] for name in sides}
            warm_ups = streams == given.streams[0]
            for _ in range(warm_ups + given.repeats):
                for name, side in sides.items():
                    prompts = [
                        [chance.randrange(1000, 40_000) for _ in range(given.prompt_tokens)] for _ in range(streams)
                    ]
                    turns[name].append(side(prompts))
            for name, taken in turns.items():
                print(row(streams, name, taken[warm_ups:]), flush=True)
    return 0


def row(streams: int, name: str, turns: list[Turn]) -> str:
    def median(of: Callable[[Turn], float]) -> float:
        return statistics.median(map(of, turns))

    def firsts(turn: Turn) -> list[float]:
        return sorted(times_s[0] for times_s in turn.times_s)

    def gaps(turn: Turn) -> list[float]:
        return sorted(b - a for times_s in turn.times_s for a, b in pairwise(times_s))

    rate = median(lambda turn: sum(map(len, turn.times_s)) / turn.took_s)
    shares = [
        f"{scale * median(lambda turn, of=of, share=share: at(of(turn), share)):.{digits}f}"
        for of, scale, digits in ((firsts, 1, 2), (gaps, 1000, 1))
        for share in (0.5, 0.95)
    ]
    return f"| {streams} | {name} | {rate:.0f} | " + " | ".join(shares) + " |"


def at(values: list[float], share: float) -> float:
    return values[min(int(share * len(values)), len(values) - 1)] if values else 0.0


def in_process(llm: LLM, prompts: list[list[int]], new_tokens: int) -> Turn:
    sampling = SamplingParams(max_new_tokens=new_tokens, ignore_eos=True)
    begun_s, ids = time.monotonic(), {}
    for place, prompt in enumerate(prompts):
        ids[llm.add(prompt, sampling)] = place
    times_s: list[list[float]] = [[] for _ in prompts]
    left = len(prompts)
    while left:
        for delta in llm.step():
            times_s[ids[delta.request_id]].append(time.monotonic() - begun_s)
            left -= delta.result is not None
    return Turn(times_s, time.monotonic() - begun_s)


@contextmanager
def served(options: dict[str, object]) -> Iterator[tuple[str, psutil.Process]]:
    """The address of a server of ours, and its process, which ends with it."""
    times = {name.removesuffix("_s"): f"{value}s" for name, value in options.items() if name.endswith("_s")}
    plain = {name: value for name, value in options.items() if not name.endswith("_s")}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (plain | times).items()]
    command = [sys.executable, "-m", "longhelix", "serve", "--port", "0", *flags]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        url = next(found[0] for line in server.stderr if (found := re.findall(r"http://[\d.:]+", line)))
        yield url, psutil.Process(server.pid)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def over_http(url: str, prompts: list[list[int]], new_tokens: int) -> Turn:
    """By a client that takes little of the cores that the ranks are on: a library's spends as much on an event as a
    server does."""
    body = {"max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    address = urlsplit(url)
    times_s: list[list[float]] = [[] for _ in prompts]
    rests = [b""] * len(prompts)  # of lines that are not whole yet
    begun_s = time.monotonic()
    with selectors.DefaultSelector() as waiting:
        for place, prompt in enumerate(prompts):
            content = json.dumps(body | {"prompt": prompt}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
            connection = socket.create_connection((address.hostname, address.port))
            connection.sendall(head.encode() + content)
            waiting.register(connection, selectors.EVENT_READ, place)
        while waiting.get_map():
            for key, _ in waiting.select():
                come, now_s = key.fileobj.recv(1 << 16), time.monotonic() - begun_s
                if not come:
                    waiting.unregister(key.fileobj)
                    key.fileobj.close()
                *lines, rests[key.data] = (rests[key.data] + come).split(b"\n")
                for line in lines:
                    if line.startswith(b"HTTP/1.1") and b" 200 " not in line:
                        raise SystemExit(f"{line.decode()}: {(come + key.fileobj.recv(1 << 16)).decode()}")
                    # An event is a chunk of its own, so that none is cut; an end without a token may have one.
                    if line.startswith(b"data: {") and CHOICES.search(line):
                        times_s[key.data].append(now_s)
    if not all(times_s):
        raise SystemExit(f"a stream of {url} had no token")
    return Turn([each[:new_tokens] for each in times_s], time.monotonic() - begun_s)


def by_openvino(given: argparse.Namespace, prompts: list[list[int]]) -> Turn:
    program = Path(__file__).parent / "peers" / "openvino_batch_run.py"
    command = [given.openvino, str(program), str(given.gguf), str(given.new_tokens)]
    done = subprocess.run(command, input=json.dumps(prompts), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return Turn(found["times_s"], found["took_s"])


if __name__ == "__main__":
    sys.exit(main())
