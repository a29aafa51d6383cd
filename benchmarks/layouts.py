"""The built-in model over a few layouts, side by side: TTFT and TTL of one prompt, medians over repeats.

Prints a Markdown table with its conditions. Longer prompts or other layouts: see --help.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile

LAYOUTS = ((1, 1), (2, 1), (1, 2))


def measure(kvp: int, tpa: int, prompt_file: str, new_tokens: int) -> dict:
    command = [sys.executable, "-m", "longhelix", "generate", "--model", "builtin", "--prompt-file", prompt_file]
    command += ["--kvp", str(kvp), "--tpa", str(tpa), "--max-new-tokens", str(new_tokens), "--ignore-eos", "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt-words", type=int, default=1000)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as prompt:
        prompt.write(" word" * arguments.prompt_words)
        prompt.flush()
        runs = {layout: [] for layout in LAYOUTS}
        for _ in range(arguments.repeats):  # in turn, so that a slow minute of the machine falls on all of them
            for layout in LAYOUTS:
                runs[layout].append(measure(*layout, prompt.name, arguments.new_tokens))
    prompt_tokens = runs[LAYOUTS[0]][0]["prompt_tokens"]
    print(
        f"SmolLM2-135M-Instruct, bfloat16, {prompt_tokens} prompt tokens, {arguments.new_tokens} new; medians of "
        f"{arguments.repeats} runs; {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}\n"
    )
    print("| kvp x tpa | TTFT, s | prefill, tokens/s | TTL, ms | exchanged, bytes per token |")
    print("|---|---|---|---|---|")
    for (kvp, tpa), results in runs.items():
        ttft_s = statistics.median(result["ttft_s"] for result in results)
        ttl_s = statistics.median(statistics.median(result["tbt_s"]) for result in results)
        exchanged = results[0]["exchanged_bytes_per_token"]
        print(f"| {kvp} x {tpa} | {ttft_s:.2f} | {prompt_tokens / ttft_s:.0f} | {1e3 * ttl_s:.1f} | {exchanged:.0f} |")


if __name__ == "__main__":
    main()
