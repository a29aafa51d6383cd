"""Prefill and decode of a GGUF model by ik_llama.cpp on the CPU, measured by its own llama-bench.

Weights are repacked at the start, and flash attention is on: its fastest settings. Each decode follows a prefill of the
context, which is not timed.
"""

import json
import subprocess

from common import make_parser, parse, quantization, show


def samples(arguments, *options: str) -> tuple[str, list[float]]:
    """Run llama-bench. Returns its commit, and the seconds of each repetition."""
    command = [arguments.program, "-m", arguments.model, "-t", str(arguments.threads), "-r", str(arguments.repeats)]
    command += ["-ctk", arguments.kv, "-ctv", arguments.kv, "-fa", "1", "-rtr", "1", "-o", "json", *options]
    (point,) = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return point["build_commit"], [nanoseconds / 1e9 for nanoseconds in point["samples_ns"]]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kv", choices=("f16", "q8_0"), default="f16", help="the KV cache's format")
    parser.add_argument("--program", required=True, help="llama-bench of ik_llama.cpp")
    arguments = parse(parser)
    for context in arguments.contexts:
        prefill_s, decode_s = [], []
        if arguments.prefill:
            commit, prefill_s = samples(arguments, "-p", str(context), "-n", "0")
        if arguments.decode:
            tokens = arguments.decode_tokens
            commit, of_all_s = samples(arguments, "-p", "0", "-n", "0", "-gp", f"{context},{tokens}")
            decode_s = [each_s / tokens for each_s in of_all_s]
        show(
            "ik_llama.cpp",
            commit,
            context,
            arguments.threads,
            prefill_s,
            decode_s,
            weights=quantization(arguments.model),
            kv=arguments.kv,
            kv_from="prefill",
        )


if __name__ == "__main__":
    main()
