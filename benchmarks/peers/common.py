"""What the peers' programs have in common: their arguments, their timing and the line they print for each point."""

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path


def make_parser(description: str) -> argparse.ArgumentParser:
    """The arguments that every whole-model peer takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("model", help="the GGUF file")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192], help="tokens in the KV cache")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--decode-tokens", type=int, default=24, help="tokens in each timed decode")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prefill", action="store_true", help="measure the prefill")
    parser.add_argument("--decode", action="store_true", help="measure the decode; neither flag: both")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments given; asking for neither measurement asks for both."""
    arguments = parser.parse_args()
    if not (arguments.prefill or arguments.decode):
        arguments.prefill = arguments.decode = True
    return arguments


def seconds(call: Callable[[], object]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def quantization(model: str) -> str:
    """The weights' format, from the end of the file's name: SmolLM2-135M-Instruct.Q4_1.gguf holds Q4_1."""
    found = re.search(r"[.-](I?Q\d\w*|BF16|F16|F32)\.gguf$", Path(model).name, re.IGNORECASE)
    return found.group(1) if found else "unknown"


def show(
    peer: str,
    version: str,
    context: int,
    threads: int,
    prefill_s: list[float],
    decode_s: list[float],
    **conditions: str,
) -> None:
    """Prints one point: the medians of what was measured, null for what was not."""
    point = {"peer": peer, "version": version, "context": context, "threads": threads}
    point["prefill_tokens_per_s"] = round(context / statistics.median(prefill_s), 1) if prefill_s else None
    point["decode_s_per_token"] = round(statistics.median(decode_s), 6) if decode_s else None
    print(json.dumps(point | conditions), flush=True)
