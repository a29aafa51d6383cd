"""Many streams against a server for minutes, while clients go away and ranks are killed: is any token lost or repeated,
does any stream end in no way or in two, does memory grow?

python benchmarks/load.py [--seconds 600] [--streams 64] [--cancel 0.1] [--kill 0.01] [--prompt-tokens 128]
    [--new-tokens 64] [--checked 200] [--out FILE]

Each stream draws how it goes from a seed. What it got is checked in two ways: by the server's count of tokens, which
each event has, and by the model: the prompt with the answer behind it is given again, and each token has to be the
likeliest one after those before it, to within `NEAR` of its log-probability (float32; greedy). A token that is missing
or repeated makes those after it unlikely. The exit status is 1 where something is wrong.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil

from longhelix.measure.bench.environment import environment

NEAR = 0.02  # natural log
SAMPLE_S = 1.0
LEFT_S = 30.0  # within which what clients went away from ends: the step that runs goes on to its end
OPTIONS = ["--model", "builtin", "--kvp", "2", "--dtype", "float32", "--max-model-len", "2048"]


@dataclass
class Stream:
    """One request. end: how it ended; cancelled ones have none."""

    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    counted: int = 0
    ends: list[str] = field(default_factory=list)
    done: int = 0
    cancelled: bool = False
    refused: int = 0
    first_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--cancel", type=float, default=0.1, help="the share of requests whose clients go away")
    parser.add_argument("--kill", type=float, default=0.01, help="the share of requests during which a rank is killed")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--checked", type=int, default=200, help="streams that are given to the model again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    report, good = asyncio.run(Load(given).run())
    print(report)
    if given.out is not None:
        given.out.write_text(report + "\n")
    return 0 if good else 1


class Load:
    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.random = random.Random(given.seed)
        self.streams: list[Stream] = []
        self.kills = 0
        self.memory: list[tuple[float, float]] = []  # seconds, bytes of the server's process

    async def run(self) -> tuple[str, bool]:
        kv = self.given.streams * (self.given.prompt_tokens + self.given.new_tokens + 32) * 2
        command = [sys.executable, "-m", "longhelix", "serve", *OPTIONS, "--port", "0"]
        command += ["--kv-cache-tokens", str(max(kv, 8192)), "--max-restarts", "1000000", "--max-replays", "1000000"]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None
            url = next(found[0] for line in server.stderr if (found := re.findall(r"http://[\d.:]+", line)))
            asyncio.get_running_loop().run_in_executor(None, server.stderr.read)  # or its pipe would fill
            self.server = psutil.Process(server.pid)
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as self.client:
                return await self._load()
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(90)
            except subprocess.TimeoutExpired:
                server.kill()

    async def _load(self) -> tuple[str, bool]:
        self.begun_s = time.monotonic()
        self.deadline_s = self.begun_s + self.given.seconds
        sampling = asyncio.create_task(self._sample())
        await asyncio.gather(*(self._client() for _ in range(self.given.streams)))
        sampling.cancel()
        took_s = time.monotonic() - self.begun_s
        await self._ready()
        health = await self._health()
        wrong = await self._wrong()
        return self._report(took_s, health, wrong)

    async def _sample(self) -> None:
        while True:
            self.memory.append((time.monotonic() - self.begun_s, self.server.memory_info().rss))
            await asyncio.sleep(SAMPLE_S)

    async def _client(self) -> None:
        while time.monotonic() < self.deadline_s:
            length = self.random.randint(1, 2 * self.given.prompt_tokens)
            stream = Stream([self.random.randrange(100, 49000) for _ in range(length)])
            self.streams.append(stream)
            await self._ask(stream)

    async def _ask(self, stream: Stream) -> None:
        leaves_after = (
            self.random.randint(0, self.given.new_tokens) if self.random.random() < self.given.cancel else None
        )
        kills_after = self.random.randint(0, self.given.new_tokens) if self.random.random() < self.given.kill else None
        body = {"prompt": stream.prompt, "max_tokens": self.given.new_tokens, "temperature": 0, "ignore_eos": True}
        body |= {"stream": True, "return_token_ids": True, "stream_options": {"continuous_usage_stats": True}}
        last_s = time.monotonic()
        while True:
            async with self.client.stream("POST", "/v1/completions", json=body) as got:
                if got.status_code == 503:  # it starts again
                    stream.refused += 1
                    await asyncio.sleep(float(got.headers["retry-after"]))
                    continue
                assert got.status_code == 200, got.status_code
                async for line in got.aiter_lines():
                    if line == "data: [DONE]":
                        stream.done += 1
                    elif line.startswith("data: "):
                        now_s = time.monotonic()
                        if stream.token_ids:
                            stream.gaps_s.append(now_s - last_s)
                        else:
                            stream.first_s = now_s - last_s
                        last_s = now_s
                        _take(stream, json.loads(line[6:]))
                    if kills_after is not None and len(stream.token_ids) >= kills_after:
                        kills_after = None
                        self._kill()
                    if leaves_after is not None and len(stream.token_ids) >= leaves_after:
                        stream.cancelled = True
                        return
            return

    def _kill(self) -> None:
        """A rank, as a fork server's child."""
        ranks = [rank for child in self.server.children() for rank in child.children()]
        if ranks:  # or they start just now
            os.kill(self.random.choice(ranks).pid, signal.SIGKILL)
            self.kills += 1

    async def _ready(self) -> None:
        while (await self.client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.2)

    async def _health(self) -> dict[str, int]:
        """Once no request is left, or `LEFT_S` later."""
        until_s = time.monotonic() + LEFT_S
        while True:
            health = (await self.client.get("/health")).json()
            if not _left(health) or time.monotonic() > until_s:
                return health
            await asyncio.sleep(0.2)

    async def _wrong(self) -> list[str]:
        """What is wrong with the streams, a sentence each."""
        wrong = []
        whole = [stream for stream in self.streams if not stream.cancelled]
        for index, stream in enumerate(self.streams):
            ends = len(stream.ends) + stream.done
            if stream.cancelled:
                if stream.counted != len(stream.token_ids):
                    wrong.append(f"stream {index} was left with {len(stream.token_ids)} tokens of {stream.counted}")
            elif ends != 2 or stream.ends != ["length"]:
                wrong.append(f"stream {index} ended with {stream.ends} and {stream.done} [DONE]")
            elif not len(stream.token_ids) == stream.counted == self.given.new_tokens:
                wrong.append(f"stream {index} has {len(stream.token_ids)} tokens, counted as {stream.counted}")
        for index, stream in enumerate(self.random.sample(whole, min(self.given.checked, len(whole)))):
            distance = await self._distance(stream)
            if distance > NEAR:
                wrong.append(f"checked stream {index} has a token that is {distance:.3f} less likely than another")
        return wrong

    async def _distance(self, stream: Stream) -> float:
        """How much less likely than the likeliest a token of an answer is, at most."""
        body = {"prompt": stream.prompt + stream.token_ids, "echo": True, "logprobs": 1, "max_tokens": 1}
        answer = (await self.client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
        start, stop = len(stream.prompt), len(stream.prompt) + len(stream.token_ids)
        pairs = zip(answer["token_logprobs"][start:stop], answer["top_logprobs"][start:stop], strict=True)
        return max((max(best.values()) - own for own, best in pairs), default=0.0)

    def _report(self, took_s: float, health: dict[str, int], wrong: list[str]) -> tuple[str, bool]:
        ends = Counter("cancelled" if one.cancelled else "+".join(one.ends) or "none" for one in self.streams)
        tokens = sum(len(stream.token_ids) for stream in self.streams)
        firsts = sorted(stream.first_s for stream in self.streams if stream.token_ids)
        gaps = sorted(gap for stream in self.streams for gap in stream.gaps_s)
        slope = _slope(self.memory[len(self.memory) // 3 :])
        left = _left(health)
        rows = {
            "streams": f"{len(self.streams)}: " + ", ".join(f"{count} {end}" for end, count in sorted(ends.items())),
            "tokens": f"{tokens}, {tokens / took_s:.0f} a second",
            "ranks killed": f"{self.kills}; the engine started again {health['restarts']} times",
            "refused with 503 meanwhile": str(sum(stream.refused for stream in self.streams)),
            "TTFT": f"p50 {_share(firsts, 0.5):.2f} s, p95 {_share(firsts, 0.95):.2f} s",
            "TBT": f"p50 {_share(gaps, 0.5):.3f} s, p95 {_share(gaps, 0.95):.3f} s, most {_share(gaps, 1):.1f} s",
            "memory of the server's process": f"{self.memory[-1][1] / 1e6:.0f} MB, {slope * 60 / 1e6:+.2f} MB a minute",
            "requests left at the end": str(left),
            "wrong": "; ".join(wrong[:10]) or "nothing",
        }
        given = self.given
        head = (
            f"{environment(time.strftime('%Y-%m-%d'))}\n\n`longhelix serve {' '.join(OPTIONS)}`; {given.streams} "
            f"clients for {given.seconds:.0f} s, prompts of 1 to {2 * given.prompt_tokens} tokens, {given.new_tokens} "
            f"new ones; {given.cancel:.0%} go away, a rank is killed in {given.kill:.1%} of the requests\n"
        )
        table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
        return f"{head}\n{table}", not wrong and left == 0


def _take(stream: Stream, event: dict) -> None:
    if "error" in event:
        stream.ends.append(event["error"]["message"])
        return
    [choice] = event["choices"]
    stream.token_ids += choice["token_ids"]
    stream.counted = event["usage"]["completion_tokens"]
    if choice["finish_reason"] is not None:
        stream.ends.append(choice["finish_reason"])


def _left(health: dict[str, int]) -> int:
    return health["running"] + health["waiting"]


def _share(values: list[float], share: float) -> float:
    return values[min(int(share * len(values)), len(values) - 1)] if values else 0.0


def _slope(points: list[tuple[float, float]]) -> float:
    """Of the line nearest to them, per second."""
    if len(points) < 2:
        return 0.0
    return statistics.linear_regression(*zip(*points, strict=True)).slope


if __name__ == "__main__":
    sys.exit(main())
