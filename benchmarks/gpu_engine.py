"""The engine on one GPU beside what the performance model predicts: prefills, and decodes of several batches.

python benchmarks/gpu_engine.py FOLDER [--system h100] [--contexts 4096 32768 131072] [--batches 1 16 64]

FOLDER holds a model in Hugging Face format; `--make llama-3-8b` writes one there first, with random weights.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

from longhelix import LLM, SamplingParams
from longhelix.perf.layouts import Layouts
from longhelix.perf.prefill import prefill_seconds
from longhelix.perf.setting import Dtypes, Setting
from longhelix.perf.step import decode_seconds
from longhelix.spec.layout import Layout
from longhelix.spec.presets import load_system

NEW_TOKENS = 48


def make(folder: Path) -> None:
    """Llama 3 8B's sizes with 2**18 positions, and a tokenizer that nobody asks for text."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        num_hidden_layers=32, vocab_size=128256, max_position_embeddings=2**18, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder)
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(100)}, unk_token="w0")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


def prompt(tokens: int, number: int) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(100, 100_000, (tokens,), generator=generator).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", choices=["llama-3-8b"])
    parser.add_argument("--system", default="h100")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--room", type=int, default=2**18 + 2**12, help="tokens of KV cache")
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--execution", default="recorded")
    given = parser.parse_args()
    if given.make and not given.folder.exists():
        make(given.folder)
        torch.cuda.empty_cache()
    started = time.perf_counter()
    longest = max(given.contexts) + NEW_TOKENS
    settings = {"device": "cuda", "execution": given.execution, "chunk_tokens": given.chunk, "max_model_len": longest}
    with LLM(str(given.folder), kv_cache_tokens=given.room, prefix_cache=False, **settings) as llm:
        print(f"started in {time.perf_counter() - started:.1f} s; {torch.cuda.get_device_name()}; {given.execution}")
        print("| context | batch | last TTFT, s | predicted | prompt tokens/s | TBT p50, ms | predicted | over |")
        print("|--:|--:|--:|--:|--:|--:|--:|--:|")
        warm = [prompt(min(given.contexts), number) for number in range(2)]
        llm.generate(warm, SamplingParams(max_new_tokens=8, ignore_eos=True))
        for context in given.contexts:
            for batch in (size for size in given.batches if size * (context + NEW_TOKENS) <= given.room):
                prompts = [prompt(context, number) for number in range(batch)]
                results = llm.generate(prompts, SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True))
                assert not any(result.preemptions or result.cached_tokens for result in results)
                ttft = max(result.ttft_s for result in results)
                last = [result.tbt_s[-24:] for result in results]
                tbt = statistics.median(time for times in last for time in times)
                predicted_ttft, predicted_tbt = predicted(llm, given, context, batch)
                prefill = f"{ttft:.3f} | {batch * predicted_ttft:.3f} | {batch * context / ttft:.0f}"
                decode = f"{tbt * 1e3:.2f} | {predicted_tbt * 1e3:.2f} | {tbt / predicted_tbt:.2f}"
                print(f"| {context} | {batch} | {prefill} | {decode} |", flush=True)


def predicted(llm: LLM, given: argparse.Namespace, context: int, batch: int) -> tuple[float, float]:
    setting = Setting(llm.config.spec, load_system(given.system), Dtypes("bfloat16", "bfloat16"))
    layouts = Layouts.of([Layout()])
    prefill_s = prefill_seconds(setting, layouts, float(context), float(min(given.chunk, context)))
    return float(prefill_s[0]), float(decode_seconds(setting, layouts, float(batch), float(context))[0])


if __name__ == "__main__":
    sys.exit(main())
