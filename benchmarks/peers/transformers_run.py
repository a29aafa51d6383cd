"""Prefill and decode of a model by transformers on the CPU, with torch's SDPA.

MODEL is a GGUF file, whose weights transformers dequantizes as it loads, or a folder that it reads as it is. Where only
decode is wanted, the KV cache is filled with random numbers in place of a prefill.
"""

from pathlib import Path

import torch
import transformers
from common import make_parser, parse, quantization, seconds, show
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

SHORT_NAMES = {"bfloat16": "bf16", "float32": "f32"}


def load(model: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model, ready to run. from_pretrained() would read a GGUF file only with accelerate at hand."""
    path, options = Path(model), {"dtype": dtype, "attn_implementation": "sdpa"}
    if not path.is_file():
        return AutoModelForCausalLM.from_pretrained(path, **options).eval()
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    loaded = AutoModelForCausalLM.from_config(config, **options)
    weights = load_gguf_checkpoint(path, return_tensors=True, model_to_load=loaded, torch_dtype=dtype)["tensors"]
    missing, unexpected = loaded.load_state_dict(weights, strict=False)
    if unexpected or not set(missing) <= {"lm_head.weight"}:  # which may be the embedding's
        raise ValueError(f"{path.name} is not the model that its header describes: {missing}, {unexpected}")
    return loaded.eval()


def random_tokens(model: PreTrainedModel, count: int) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, (1, count))


def filled(model: PreTrainedModel, tokens: int) -> DynamicCache:
    """A KV cache of `tokens` tokens, of random numbers."""
    config = model.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        keys, values = torch.randn(2, 1, config.num_key_value_heads, tokens, head_size, dtype=model.dtype)
        cache.update(keys, values, layer)
    return cache


def forward(model: PreTrainedModel, tokens: torch.Tensor, cache: DynamicCache) -> None:
    """One step over these tokens, with the logits of the last one."""
    model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)


def prefill(model: PreTrainedModel, context: int) -> tuple[float, DynamicCache]:
    """Seconds of one prefill, and the cache that it leaves."""
    tokens, cache = random_tokens(model, context), DynamicCache(config=model.config)
    return seconds(lambda: forward(model, tokens, cache)), cache


def decode(model: PreTrainedModel, cache: DynamicCache, count: int) -> list[float]:
    """Seconds of each of `count` steps; what they add to the cache is dropped at the end."""
    token = random_tokens(model, 1)
    steps = [seconds(lambda: forward(model, token, cache)) for _ in range(count)]
    cache.crop(-count)
    return steps


@torch.inference_mode()
def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--dtype", choices=SHORT_NAMES, nargs="+", default=list(SHORT_NAMES))
    arguments = parse(parser)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for dtype in arguments.dtype:
        model = load(arguments.model, getattr(torch, dtype))
        stored = quantization(arguments.model)
        for context in arguments.contexts:
            prefill_s, decode_s, cache = [], [], None
            if arguments.prefill:
                prefill(model, 16)  # warms up
                for _ in range(arguments.repeats):
                    cache = None  # or two long ones would lie in memory
                    took, cache = prefill(model, context)
                    prefill_s.append(took)
            else:
                cache = filled(model, context)
            if arguments.decode:
                decode(model, cache, 2)
                for _ in range(arguments.repeats):
                    decode_s += decode(model, cache, arguments.decode_tokens)
            show(
                "transformers",
                f"{transformers.__version__}, torch {torch.__version__}",
                context,
                arguments.threads,
                prefill_s,
                decode_s,
                weights=SHORT_NAMES[dtype] + (f" (from {stored})" if stored != "unknown" else ""),
                kv=SHORT_NAMES[dtype],
                kv_from="prefill" if arguments.prefill else "filled",
            )


if __name__ == "__main__":
    main()
