"""torch's own forms of one decode attention: one query token against a long KV cache, in GB of KV read per second.

sdpa: F.scaled_dot_product_attention with grouped queries. sdpa_folded: the same with each group's heads folded into the
query's rows, so that a KV head is read once for its group. flash_for_cpu: the op behind it, folded, which also returns
the log-sum-exp. matmuls: two matrix products around a softmax, with its log-sum-exp.

A shape has the heads of the model that it is named after. The latent one is MLA's decode: K is the cached latent and V
the first part of it, counted once. Each line also says how fast memory is just read (read_gb_per_s).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

DTYPES = ("float32", "bfloat16")
READ_BYTES = 1 << 29


@dataclass(frozen=True)
class Shape:
    """Heads and sizes of one attention. Where it is latent, the values are the first numbers of the keys."""

    heads: int
    kv_heads: int
    size: int
    value_size: int
    latent: bool = False


SHAPES = {
    "smollm2-135m": Shape(9, 3, 64, 64),
    "llama-3.2-1b": Shape(32, 8, 64, 64),
    "gpt-oss-20b": Shape(64, 8, 64, 64),
    "llama-3.2-3b": Shape(24, 8, 128, 128),
    "llama-3.1-8b": Shape(32, 8, 128, 128),
    "llama-3.1-70b": Shape(64, 8, 128, 128),
    "deepseek-v2-lite": Shape(16, 1, 576, 512, latent=True),
}


class Attention:
    """One query token's attention over a KV cache of random numbers, in torch's different forms."""

    def __init__(self, shape: Shape, context: int, dtype: torch.dtype):
        self.scale = shape.size**-0.5
        self.query = torch.randn(1, shape.heads, 1, shape.size, dtype=dtype)
        self.folded = self.query.view(1, shape.kv_heads, shape.heads // shape.kv_heads, shape.size)
        self.keys = torch.randn(1, shape.kv_heads, context, shape.size, dtype=dtype)
        self.values = self.keys[..., : shape.value_size] if shape.latent else torch.randn_like(self.keys)
        self.bytes = self.keys.nbytes * (1 if shape.latent else 2)

    def sdpa(self) -> torch.Tensor:
        return scaled_dot_product_attention(self.query, self.keys, self.values, scale=self.scale, enable_gqa=True)

    def sdpa_folded(self) -> torch.Tensor:
        return scaled_dot_product_attention(self.folded, self.keys, self.values, scale=self.scale)

    def flash_for_cpu(self) -> tuple[torch.Tensor, torch.Tensor]:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(self.folded, self.keys, self.values, 0.0, False, scale=self.scale)

    def matmuls(self) -> tuple[torch.Tensor, torch.Tensor]:
        scores = (self.folded @ self.keys.transpose(-1, -2)).float() * self.scale
        lse = torch.logsumexp(scores, -1, keepdim=True)
        return torch.exp(scores - lse).to(self.values.dtype) @ self.values, lse


def median_s(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call, after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256 * 1024])
    parser.add_argument("--threads", type=int, nargs="+", default=[2])
    parser.add_argument("--shapes", choices=SHAPES, nargs="+", default=list(SHAPES))
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        memory = torch.randn(READ_BYTES // 4)
        read_s = median_s(memory.sum, arguments.repeats)
        del memory
        for context in arguments.contexts:
            for name in arguments.shapes:
                shape = SHAPES[name]
                for dtype in arguments.dtypes:
                    attention = Attention(shape, context, getattr(torch, dtype))
                    forms = [attention.sdpa_folded, attention.matmuls]
                    if not shape.latent:  # of which sdpa would make one copy a head; flash needs keys and values alike
                        forms += [attention.sdpa, attention.flash_for_cpu]
                    for form in forms:
                        step_s = median_s(form, arguments.repeats)
                        point = {"peer": "torch", "version": torch.__version__, "form": form.__name__, "shape": name}
                        point |= {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_size": shape.size}
                        point |= {"context": context, "threads": threads, "kv": dtype, "step_s": round(step_s, 6)}
                        point["kv_gb_per_s"] = round(attention.bytes / step_s / 1e9, 2)
                        point["read_gb_per_s"] = round(READ_BYTES / read_s / 1e9, 2)
                        print(json.dumps(point), flush=True)


if __name__ == "__main__":
    main()
