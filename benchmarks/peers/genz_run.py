"""GenZ on one question: its Pareto search over TP x PP for one decode step at a long context."""

import argparse
import contextlib
import io
import json
import time
import warnings
from importlib.metadata import version

GB200 = {"Flops": 10_000, "Memory_size": 186, "Memory_BW": 8_000, "ICN": 900, "real_values": True}


def search(model: str, gpus: int, context: int) -> list[dict[str, float]]:
    """Its frontier at each batch size, up to the first that does not fit, which it answers with an exception."""
    from GenZ import get_pareto_optimal_performance

    found = []
    for batch in (1, 2, 4, 8, 16, 32):
        try:
            frontier = get_pareto_optimal_performance(
                stage="decode", model=model, total_nodes=gpus, batch_list=[batch], input_tokens=context,
                output_tokens=1, system_name=GB200, bits="fp4",
            )  # fmt: skip
        except ValueError:
            break
        found += frontier.to_dict("records")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="deepseek-ai/DeepSeek-V3-Base")
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--context", type=int, default=1_000_000)
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        found = search(asked.model, asked.gpus, asked.context)
    best = min(found, key=lambda row: row["Latency(ms)"])
    point = {
        "peer": "genz-llm",
        "version": version("genz-llm"),
        "seconds": time.perf_counter() - start,
        "points": len(found),
        "user_tokens_per_s": 1e3 / float(best["Latency(ms)"]),
        "layout": f"TP {int(best['TP'])} x PP {int(best['PP'])}",
        "memory_gb": None,
    }
    print(json.dumps(point))


if __name__ == "__main__":
    main()
