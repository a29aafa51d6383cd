"""Saved contexts of the built-in model: the first token after a fresh prefill, and after a load under other layouts.

A text of the repository is computed over KVP 2 and saved; then each layout loads it several times (each time as for
another cache salt, so that nothing is there already) and answers a question behind it. Times are those of a caller:
what is loaded is checked, TTFT is from the question on, and "together" is one request that names the context.

    python benchmarks/contexts.py [--tokens 4096] [--times 5] [--kv-dtype float32]
"""

import argparse
import statistics
import tempfile
import time
from datetime import datetime
from pathlib import Path

from longhelix import LLM, Layout, SamplingParams
from longhelix.measure.bench.environment import environment
from longhelix.scheduler.request import ServiceLevel

LAYOUTS = {"KVP 1": Layout(), "KVP 2": Layout(kvp=2), "KVP 3": Layout(kvp=3), "TPA 3": Layout(tpa=3)}
QUESTION = "\n\nQuestion: what is a KV block?\nAnswer:"
SAMPLING = SamplingParams(max_new_tokens=16)


def text() -> str:
    folder = Path(__file__).parents[1] / "docs"
    return "".join(path.read_text() for path in sorted(folder.rglob("*.md")))


def median_ms(times_s: list[float]) -> str:
    """The median, and the distance of the quartiles."""
    low, middle, high = statistics.quantiles(times_s, n=4)
    return f"{1e3 * middle:.0f} ({1e3 * (high - low):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--kv-dtype", default="float32")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"dtype": "float32", "kv_dtype": arguments.kv_dtype, "contexts_dir": Path(folder)}
        with LLM("builtin", Layout(kvp=2), **settings) as llm:
            context = llm.tokenizer.encode(text())[: arguments.tokens]
            (fresh,) = llm.generate([context + llm.tokenizer.encode_more(QUESTION)], SAMPLING)
            assert fresh.ttft_s is not None
            start_s = time.monotonic()
            saved = llm.save_context("docs", context)
            save_s = time.monotonic() - start_s
        print(f"{environment(datetime.now().astimezone().isoformat(timespec='seconds'))}\n")
        size = f"{saved.num_tokens} tokens, {saved.num_bytes / 1e6:.0f} MB of {arguments.kv_dtype} KV, by KVP 2"
        print(f"{size}: fresh TTFT {1e3 * fresh.ttft_s:.0f} ms, saved in {1e3 * save_s:.0f} ms more\n")
        print("| layout | load, ms | TTFT, ms | together, ms | times faster | same tokens |")
        print("|---|---|---|---|---|---|")
        for name, layout in LAYOUTS.items():
            with LLM("builtin", layout, **settings) as llm:
                print(row(name, llm, fresh.ttft_s, fresh.token_ids, arguments.times))


def row(name: str, llm: LLM, fresh_s: float, token_ids: list[int], times: int) -> str:
    loads_s, first_s, together_s, same = [], [], [], True
    for turn in range(times + 1):
        start_s = time.monotonic()
        assert llm.load_context("docs", cache_salt=f"{turn}").loaded_blocks
        load_s = time.monotonic() - start_s
        results = [
            llm.generate([QUESTION], SAMPLING, ServiceLevel(cache_salt=salt), context="docs")[0]
            for salt in (f"{turn}", f"{turn} together")
        ]
        same = same and all(result.token_ids == token_ids for result in results)
        if turn:  # the first one warms up
            loads_s.append(load_s)
            first_s.append(results[0].ttft_s)
            together_s.append(results[1].ttft_s)
    faster = fresh_s / statistics.median(together_s)
    times_ms = " | ".join(map(median_ms, (loads_s, first_s, together_s)))
    return f"| {name} | {times_ms} | {faster:.0f} | {'yes' if same else 'no'} |"


if __name__ == "__main__":
    main()
