"""Sequence parallelism for a transformer that knows nothing of longhelix: compiled without and with the pass, compared.

    torchrun --nproc-per-node 2 examples/sequence_parallel.py [--tokens 1000] [--quantize int8]

Every rank has some heads and some inner columns of each layer, and sums are torch's functional all-reduce. On a GPU run
it over NCCL, and set torch._inductor.config._micro_pipeline_tp for products that overlap with what the pass leaves.
"""

import argparse
import time

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from longhelix.passes import SequenceParallel

HIDDEN, INNER, HEADS, LAYERS = 512, 1536, 8, 4


class Attention(nn.Module):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.heads = HEADS // ranks
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN // ranks, bias=False)
        self.output = nn.Linear(HIDDEN // ranks, HIDDEN, bias=False)

    def forward(self, x_TH: Tensor) -> Tensor:
        q, k, v = self.qkv(x_TH).view(len(x_TH), 3, self.heads, -1).permute(1, 2, 0, 3)
        return self.output(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1))


class FeedForward(nn.Module):
    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INNER // ranks, bias=False)
        self.up = nn.Linear(HIDDEN, INNER // ranks, bias=False)
        self.down = nn.Linear(INNER // ranks, HIDDEN, bias=False)

    def forward(self, x_TH: Tensor) -> Tensor:
        return self.down(silu(self.gate(x_TH)) * self.up(x_TH))


class Transformer(nn.Module):
    """Hidden states to hidden states."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        blocks = [block(ranks) for _ in range(LAYERS) for block in (Attention, FeedForward)]
        self.blocks = nn.ModuleList(blocks)
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN, eps=1e-6) for _ in blocks)
        self.last = nn.RMSNorm(HIDDEN, eps=1e-6)

    def forward(self, x_TH: Tensor) -> Tensor:
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x_TH = x_TH + functional.all_reduce(block(norm(x_TH)), "sum", dist.group.WORLD)
        return self.last(x_TH)


def seconds(run, x_TH: Tensor, times: int = 5) -> float:
    """The median of some runs."""
    taken_s = []
    for _ in range(times):
        dist.barrier()
        start_s = time.perf_counter()
        run(x_TH)
        taken_s.append(time.perf_counter() - start_s)
    return sorted(taken_s)[times // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--min-tokens", type=int, default=1)
    parser.add_argument("--quantize", choices=("int8", "fp8"))
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    model = Transformer(dist.get_world_size())
    x_TH = torch.randn(arguments.tokens, HIDDEN, generator=torch.Generator().manual_seed(0))

    sp = SequenceParallel(min_tokens=arguments.min_tokens, quantize=arguments.quantize)
    with torch.no_grad():
        plain = torch.compile(model, fullgraph=True, dynamic=False)
        expected_TH, plain_s = plain(x_TH), seconds(plain, x_TH)
        torch.compiler.reset()
        changed = torch.compile(model, fullgraph=True, dynamic=False, options={"post_grad_custom_pre_pass": sp})
        found_TH, changed_s = changed(x_TH), seconds(changed, x_TH)

    report = sp.report()
    if dist.get_rank() == 0:
        print("matches:    ", {name: count for name, count in report["patterns"].items() if count} or "none")
        print("collectives:", report["collectives"])
        print("bytes sent: ", report["bytes"])
        print("left alone: ", sp.explain() or "nothing")
        difference = (found_TH - expected_TH).abs().max() / expected_TH.abs().max()
        print(f"largest difference, of the largest number: {difference:.1e}")
        print(f"{plain_s * 1e3:.1f} ms without, {changed_s * 1e3:.1f} ms with sequence parallelism")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
