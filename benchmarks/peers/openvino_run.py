"""Prefill and decode of a GGUF model by OpenVINO GenAI on the CPU.

Where only decode is wanted, the KV cache is not computed but filled: the model that LLMPipeline makes of the file is
saved, given paged attention as LLMPipeline gives it, run over a prompt of one block, and that block is repeated until
the cache is as long as the context.
"""

import tempfile
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
from common import make_parser, parse, quantization, seconds, show
from openvino._offline_transformations import paged_attention_transformation

WARM_UP_TOKENS = 32
FIRST_TOKEN, LAST_TOKEN = 100, 40000  # ordinary ones, in any vocabulary worth measuring


def random_tokens(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.integers(FIRST_TOKEN, LAST_TOKEN, count)


class Pipeline:
    """What a user runs: LLMPipeline and its own perf_metrics. It keeps the KV of earlier prompts (prefix caching)."""

    def __init__(self, model: str, options: dict):
        self.pipeline = genai.LLMPipeline(model, "CPU", **options)

    def run(self, tokens: np.ndarray, new_tokens: int) -> genai.RawPerfMetrics:
        config = genai.GenerationConfig(
            max_new_tokens=new_tokens, do_sample=False, ignore_eos=True, apply_chat_template=False
        )
        mask = np.ones((1, len(tokens)), np.int64)
        prompt = genai.TokenizedInputs(ov.Tensor(tokens[None]), ov.Tensor(mask))
        return self.pipeline.generate(prompt, config).perf_metrics.raw_metrics

    def prefill(self, tokens: np.ndarray) -> float:
        """Seconds to the first new token of a prompt that was not seen before."""
        return self.run(tokens, 1).m_times_to_first_token[0] / 1e6

    def decode(self, tokens: np.ndarray, count: int) -> list[float]:
        """Seconds of each of `count` steps after this prompt, whose KV is still there."""
        return [microseconds / 1e6 for microseconds in self.run(tokens, count + 1).m_durations]


class FilledModel:
    """The same model with a KV cache of our own, whose blocks all hold the first one's keys and values."""

    def __init__(self, model: str, options: dict):
        with tempfile.TemporaryDirectory() as folder:  # what is saved lies next to the file
            link = Path(folder, "model.gguf")
            link.symlink_to(Path(model).resolve())
            genai.LLMPipeline(str(link), "CPU", enable_save_ov_model=True)
            network = ov.Core().read_model(Path(folder, "openvino_model.xml"))
            paged_attention_transformation(network)
            self.compiled = ov.Core().compile_model(network, "CPU", options)
        self.block_tokens = self.compiled.input("value_cache.0").partial_shape[2].get_length()

    def fill(self, context: int, more: int) -> None:
        """Makes the cache hold `context` tokens, with room for `more`."""
        self.blocks = np.arange(-(-(context + more) // self.block_tokens), dtype=np.int32)
        self.request = self.compiled.create_infer_request()
        caches = {}
        for port in self.compiled.inputs:
            if port.any_name.startswith(("key_cache.", "value_cache.")):
                sizes = [size.get_length() for size in list(port.partial_shape)[1:]]
                caches[port.any_name] = ov.Tensor(port.element_type, ov.Shape([len(self.blocks), *sizes]))
                self.request.set_tensor(port.any_name, caches[port.any_name])
        self.step(np.arange(FIRST_TOKEN, FIRST_TOKEN + self.block_tokens), 0)
        for cache in caches.values():
            stored = cache.data.view(np.uint8)
            stored[1:] = stored[:1]

    def step(self, tokens: np.ndarray, past: int) -> float:
        """Seconds of one forward pass over tokens that follow `past` others."""
        total = past + len(tokens)
        used = -(-total // self.block_tokens)
        inputs = {
            "input_ids": tokens.astype(np.int64),
            "position_ids": np.arange(past, total, dtype=np.int64),
            "past_lens": np.array([past], np.int32),
            "subsequence_begins": np.array([0, len(tokens)], np.int32),
            "block_indices": self.blocks[:used],
            "block_indices_begins": np.array([0, used], np.int32),
            "max_context_len": np.array(total, np.int32),
        }
        for name, value in inputs.items():
            self.request.set_tensor(name, ov.Tensor(value))
        return seconds(self.request.infer)

    def decode(self, context: int, count: int) -> list[float]:
        """Seconds of each of `count` steps after the first `context` tokens."""
        return [self.step(np.array([FIRST_TOKEN]), context + index) for index in range(count)]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--kv", choices=("u8", "bf16", "f16"), default="u8", help="the KV cache's format")
    arguments = parse(parser)
    options = {"INFERENCE_NUM_THREADS": arguments.threads, "KV_CACHE_PRECISION": arguments.kv}
    rng = np.random.default_rng(0)
    runner = (Pipeline if arguments.prefill else FilledModel)(arguments.model, options)
    for context in arguments.contexts:
        prefill_s, decode_s = [], []
        if arguments.prefill:
            runner.prefill(random_tokens(rng, WARM_UP_TOKENS))  # warms up
            for _ in range(arguments.repeats):
                prompt = random_tokens(rng, context)
                prefill_s.append(runner.prefill(prompt))
        else:
            prompt = context
            runner.fill(context, arguments.decode_tokens)
        if arguments.decode:
            runner.decode(prompt, 2)
            decode_s = [s for _ in range(arguments.repeats) for s in runner.decode(prompt, arguments.decode_tokens)]
        show(
            "openvino-genai",
            genai.__version__.split("-")[0],
            context,
            arguments.threads,
            prefill_s,
            decode_s,
            weights=quantization(arguments.model),
            kv=arguments.kv,
            kv_from="prefill" if arguments.prefill else "filled",
        )


if __name__ == "__main__":
    main()
