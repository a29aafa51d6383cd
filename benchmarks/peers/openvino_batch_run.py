"""Prompts together through OpenVINO GenAI's continuous batching on the CPU: when each token of each came.

Reads the prompts, lists of token ids, as JSON from standard input; prints {"times_s", "took_s"}.
"""

import argparse
import json
import sys
import time

import numpy as np
import openvino as ov
import openvino_genai as genai


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="the GGUF file, or a folder that was made of it")
    parser.add_argument("new_tokens", type=int)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    prompts = json.load(sys.stdin)
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = 2
    scheduler.max_num_seqs = max(len(prompts), 1)
    scheduler.enable_prefix_caching = False
    options = {"INFERENCE_NUM_THREADS": given.threads}
    pipeline = genai.ContinuousBatchingPipeline(given.model, scheduler, "CPU", options)
    config = genai.GenerationConfig(
        max_new_tokens=given.new_tokens, do_sample=False, ignore_eos=True, apply_chat_template=False
    )
    run(pipeline, config, [[1000] * 32])
    times_s, took_s = run(pipeline, config, prompts)
    print(json.dumps({"times_s": times_s, "took_s": took_s}))


def run(pipeline, config, prompts):
    begun_s = time.monotonic()
    handles = [
        pipeline.add_request(index, ov.Tensor(np.array([prompt], np.int64)), config)
        for index, prompt in enumerate(prompts)
    ]
    times_s = [[] for _ in prompts]
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now_s = time.monotonic() - begun_s
        for place, handle in enumerate(handles):
            while handle.can_read():
                for output in handle.read().values():
                    times_s[place] += [now_s] * len(output.generated_ids)
    return times_s, time.monotonic() - begun_s


if __name__ == "__main__":
    main()
