"""Latent attention over one layer's cache in its two forms, in turn: a chunk of rows after a prefix.

Sizes of a DeepSeek-V2-Lite layer (16 heads), bfloat16; what both forms share (projections, writes) is left out.
Processor time of one thread, so that what else runs on the machine counts little.

    python benchmarks/latent_forms.py [--rows 512] [--prefixes 0 4096 16384] [--dtype bfloat16]
"""

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable

import torch

from longhelix.compute.kernels import KVFormat, direct_attention, native, partial_attention, write_kv
from longhelix.measure.bench.environment import environment
from longhelix.spec import MLA

MLA_SIZES = MLA(q_lora_rank=None, kv_lora_rank=512, nope_size=128, rope_size=64, value_size=128)
HEADS, BLOCK_TOKENS, TURNS = 16, 16, 7


def forms(rows: int, prefix: int, dtype: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Both forms as calls: absorbed, with its products of queries and values, and direct."""
    mla, tokens, torch_dtype = MLA_SIZES, prefix + rows, getattr(torch, dtype)
    blocks = -(-tokens // BLOCK_TOKENS)
    sizes = mla.cached_size, mla.kv_lora_rank, torch.device("cpu")
    layer = KVFormat.choose(dtype, BLOCK_TOKENS, 1, *sizes, shared_values=True).new_layer(blocks, sizes[-1])
    write_kv(torch.randn(tokens, 1, mla.cached_size).to(torch_dtype), None, layer, torch.arange(tokens))
    up_qXZ = torch.randn(HEADS, mla.nope_size + mla.value_size, mla.kv_lora_rank) / mla.kv_lora_rank**0.5
    up_qXZ = up_qXZ.to(torch_dtype)
    key_up_qCZ, value_up_qCZ = up_qXZ.split((mla.nope_size, mla.value_size), dim=1)
    q_TqC = torch.randn(rows, HEADS, mla.nope_size + mla.rope_size).to(torch_dtype)
    limits_T = torch.arange(prefix + 1, tokens + 1)
    table = torch.arange(blocks).unsqueeze(0), torch.tensor([0, rows]), limits_T, q_TqC.shape[2] ** -0.5

    def absorbed() -> object:
        plain_TqC, rotated_TqC = q_TqC.split((mla.nope_size, mla.rope_size), dim=2)
        latent_TqZ = torch.einsum("tqc,qcz->tqz", plain_TqC, key_up_qCZ)
        out_TqZ, _ = partial_attention(torch.cat((latent_TqZ, rotated_TqC), dim=2), layer, *table)
        return torch.einsum("tqz,qcz->tqc", out_TqZ, value_up_qCZ)

    return absorbed, lambda: direct_attention(q_TqC, layer, up_qXZ, mla.nope_size, *table)


def processor_ms(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return 1e3 * (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[512])
    parser.add_argument("--prefixes", type=int, nargs="+", default=[0, 4096, 16384])
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    native.set_num_threads(1)
    print(json.dumps(environment(datetime.date.today().isoformat())))
    print("| rows | prefix | absorbed, ms | direct, ms | ratio |\n|---|---|---|---|---|")
    for rows in arguments.rows:
        for prefix in arguments.prefixes:
            absorbed, direct = forms(rows, prefix, arguments.dtype)
            absorbed(), direct()
            turns = [(processor_ms(absorbed), processor_ms(direct)) for _ in range(TURNS)]
            first, second = (statistics.median(column) for column in zip(*turns, strict=True))
            print(f"| {rows} | {prefix} | {first:.1f} | {second:.1f} | {first / second:.2f} |", flush=True)


if __name__ == "__main__":
    main()
