"""What int8 activations (`--activation-dtype int8`) cost and gain: perplexity, prefill and decode steps of a batch of
the built-in model, beside bfloat16, int8 weights alone, and OpenVINO's prefill.

What is timed takes turns; figures are medians. Perplexity is that of the documents under docs/, in
windows of 1,024 tokens that begin anew.

    python benchmarks/activations.py [--windows 6] [--prompts 1024 8192] [--requests 16] [--repeats 5] [--threads N]
                                     [--openvino build/peers/openvino/bin/python]
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from longhelix.compute.models.gguf_checkpoint import GgufCheckpoint
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.engine.text.tokenizer import Tokenizer
from longhelix.measure.bench.environment import environment
from longhelix.measure.configuration import configure
from longhelix.measure.model import LongRequests, RankModel, prefill_steps
from longhelix.measure.timing import interleave
from longhelix.spec.layout import Layout

ROOT = Path(__file__).parent.parent
SETTINGS = {
    "bfloat16": {},
    "int8 weights": {"weight_dtype": "int8"},
    "int8 weights and activations": {"weight_dtype": "int8", "activation_dtype": "int8"},
}
WINDOW_TOKENS, CONTEXT_TOKENS = 1024, 1024


def read_windows(count: int) -> list[tuple[int, ...]]:
    """Token ids of the documents, one after the other by name."""
    checkpoint = open_checkpoint("builtin")
    assert isinstance(checkpoint, GgufCheckpoint)
    tokenizer = Tokenizer.from_gguf(checkpoint.metadata)
    text = "".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    ids = tokenizer.encode(text)
    return [tuple(ids[start : start + WINDOW_TOKENS]) for start in range(0, count * WINDOW_TOKENS, WINDOW_TOKENS)]


def perplexity(model: RankModel, windows: list[tuple[int, ...]]) -> float:
    runner, losses = model.runner(WINDOW_TOKENS), []
    for index, ids in enumerate(windows):
        logits = []
        for step in prefill_steps(model, index, ids):
            runner.running.admit(step)
            logits.append(model.decoder.logits(runner.forward(step)))
        losses.append(cross_entropy(torch.cat(logits)[:-1], torch.tensor(ids[1:])).item())
    return torch.tensor(losses).mean().exp().item()


def prefill(model: RankModel, length: int) -> Callable[[], None]:
    """Computes a prompt, each time another one."""
    runner, ids, count = model.runner(length), tuple(torch.randint(49152, (length,)).tolist()), iter(range(10**6))
    return lambda: [runner.execute(step) for step in prefill_steps(model, next(count), ids)]


def openvino_tokens_per_s(python: str, prompts: list[int], threads: int) -> dict[int, float]:
    command = [python, ROOT / "benchmarks/peers/openvino_run.py", open_checkpoint("builtin").path, "--prefill"]
    command += ["--contexts", *map(str, prompts), "--repeats", "1", "--threads", str(threads)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    return {row["context"]: row["prefill_tokens_per_s"] for row in rows}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--openvino", help="the Python of an environment with openvino-genai (peers/install.sh)")
    arguments = parser.parse_args()
    print(json.dumps(environment(datetime.now().astimezone().isoformat(timespec="seconds"))))
    longest = max(*arguments.prompts, (CONTEXT_TOKENS + 16) * arguments.requests, WINDOW_TOKENS)
    with tempfile.TemporaryDirectory() as directory:
        models = {
            name: RankModel.join(
                configure("builtin", Layout(), (longest,), threads=arguments.threads, **settings), 0, Path(directory)
            )
            for name, settings in SETTINGS.items()
        }
        windows = read_windows(arguments.windows)
        for name, model in models.items():
            print(f"perplexity, {len(windows)} x {WINDOW_TOKENS} tokens, {name}: {perplexity(model, windows):.3f}")
        contexts = [CONTEXT_TOKENS] * arguments.requests
        for requests in (1, arguments.requests):
            steps = {name: LongRequests(model, *contexts[:requests]).step for name, model in models.items()}
            for name, timing in interleave(steps, 4 * arguments.repeats).items():
                print(f"decode of {requests} at {CONTEXT_TOKENS}, {name}: {1e3 * timing.median_s:.2f} ms a step")
        rates: dict[tuple[str, int], list[float]] = {}
        for _ in range(arguments.repeats):
            for length in arguments.prompts:
                calls = {name: prefill(model, length) for name, model in models.items()}
                for name, timing in interleave(calls, 1, warm_up=0).items():
                    rates.setdefault((name, length), []).append(length / timing.median_s)
            if arguments.openvino:
                found = openvino_tokens_per_s(arguments.openvino, arguments.prompts, arguments.threads)
                for length, rate in found.items():
                    rates.setdefault(("openvino", length), []).append(rate)
    for (name, length), samples in sorted(rates.items(), key=lambda item: item[0][1]):
        median = statistics.median(samples)
        print(f"prefill of {length}, {name}: {median:.0f} tokens/s ({min(samples):.0f} to {max(samples):.0f})")


if __name__ == "__main__":
    main()
