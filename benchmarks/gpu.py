"""The Triton kernels on one GPU, as fractions of the read bandwidth that a kernel of ours measures in the same run.

Prints a Markdown table with its conditions; --out PATH writes it there, and JSON with the environment beside it.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from longhelix.compute.kernels.packed_rows import PackedRows
from longhelix.spec import ACTIVATION_DTYPES, FORMATS

BLOCK_TOKENS = 16
CONTEXTS = ((1, 2**20), (8, 2**17), (64, 2**14))  # rows, tokens of each
GROUP = 8
# kv heads, key size, value size, dtype of the pool
GQA = ((8, 128, torch.bfloat16), (1, 128, torch.bfloat16), (8, 64, torch.bfloat16), (8, 128, torch.float8_e4m3fn))

# Formats of packed weights, outputs and inputs: gate and up of Llama 3 70B, and a share of an output projection.
PACKED = ("fp8-block", "fp8-channel", "nvfp4", "mxfp4", "int4-g128", "int4-g32", "q8_0", "q4_k", "q6_k", "iq4_xs")
PACKED_SIZES = ((57344, 8192), (7168, 2048))
PACKED_ROWS = (1, 8, 16, 64, 512, 4096)
PACKED_BYTES = 2**29  # that a measured call reads, so that no cache holds them


@dataclass
class Result:
    """`bytes` are those that the op must move, `flops` what it must compute, where that is much; times are medians. Of
    ops that are not captured, graph_us is None."""

    name: str
    bytes: int
    flops: int
    eager_us: float
    graph_us: float | None
    host_us: float

    @property
    def best_us(self) -> float:
        return self.eager_us if self.graph_us is None else self.graph_us

    @property
    def gigabytes_per_s(self) -> float:
        return self.bytes / self.best_us / 1e3

    @property
    def teraflops_per_s(self) -> float:
        return self.flops / self.best_us / 1e6


def device_us(call: Callable[[], object], repeats: int) -> float:
    """Median time on the device from event to event, after three calls that compile and warm up."""
    for _ in range(3):
        call()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        call()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times)


def host_us(call: Callable[[], object], repeats: int) -> float:
    """Median time until a launch returns to Python."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


def measure(
    name: str, num_bytes: int, call: Callable[[], object], repeats: int, capture: bool = True, flops: int = 0
) -> Result:
    eager_us = device_us(call, repeats)
    graph_us = None
    if capture:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        graph_us = device_us(graph.replay, repeats)
    result = Result(name, num_bytes, flops, eager_us, graph_us, host_us(call, repeats))
    print(f"{name}: {result.best_us:.0f} us, {result.gigabytes_per_s:.0f} GB/s", file=sys.stderr)
    return result


def ceilings(repeats: int) -> tuple[float, float]:
    """GB/s of a sum over 4 GiB, the best of a few tile sizes; and of a copy, reads and writes counted."""
    import triton
    import triton.language as tl

    @triton.jit
    def sum_tiles(x_ptr, sums_ptr, TILE: tl.constexpr):
        tile = tl.program_id(0).to(tl.int64)
        tl.store(sums_ptr + tile, tl.sum(tl.load(x_ptr + tile * TILE + tl.arange(0, TILE))))

    x_X = torch.randint(-100, 100, (2**30,), dtype=torch.int32, device="cuda")
    read_us = []
    for tile in (2048, 4096, 8192, 16384):
        sums_X = torch.empty(len(x_X) // tile, dtype=torch.int32, device="cuda")
        read_us.append(device_us(lambda tile=tile, sums_X=sums_X: sum_tiles[len(sums_X),](x_X, sums_X, tile), repeats))
        assert torch.equal(sums_X, x_X.view(-1, tile).sum(1, dtype=torch.int32)), "the sum has not read everything"
    target_X = torch.empty_like(x_X)
    copy_us = device_us(lambda: target_X.copy_(x_X), repeats)
    return x_X.nbytes / min(read_us) / 1e3, 2 * x_X.nbytes / copy_us / 1e3


def random_pool(size: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """A pool of normal values; filled block by block, so that no second one is needed in float32."""
    kv_PADkC = torch.empty(size, dtype=dtype, device="cuda")
    for kv_pADkC in kv_PADkC.split(4096):
        kv_pADkC.copy_(torch.randn(kv_pADkC.shape, device="cuda"))
    return kv_PADkC, torch.ones(size[:4], device="cuda") if dtype.itemsize == 1 else None


def decode(kv_heads: int, group: int, key_size: int, value_size: int, dtype: torch.dtype, repeats: int) -> list[Result]:
    """Decode attention over each of CONTEXTS; the bytes are those of the KV (and its scales) alone."""
    from longhelix.compute.kernels.triton import partial_attention

    results = []
    num_blocks = CONTEXTS[0][1] // BLOCK_TOKENS
    arrays = 2 if key_size == value_size else 1
    kv_PADkC, scales_PADk = random_pool((num_blocks, arrays, BLOCK_TOKENS, kv_heads, key_size), dtype)
    num_bytes = kv_PADkC.nbytes + (0 if scales_PADk is None else scales_PADk.nbytes)
    for rows, tokens in CONTEXTS:
        blocks_BJ = torch.randperm(num_blocks, device="cuda").view(rows, -1)
        starts_B = torch.arange(rows + 1, device="cuda")
        blocks_X, extents_B2 = (
            blocks_BJ.flatten(),
            torch.stack((starts_B[:-1], starts_B[1:]), dim=1) * blocks_BJ.shape[1],
        )
        table = blocks_X, extents_B2, starts_B, torch.full((rows,), tokens, device="cuda")
        q_TqC = torch.randn(rows, kv_heads * group, key_size, device="cuda", dtype=torch.bfloat16)
        scale = key_size**-0.5
        shape = f"{rows} x {tokens}, {kv_heads * group}/{kv_heads} heads of {key_size}, {str(dtype)[6:]}"

        def attend(q_TqC=q_TqC, table=table, tokens=tokens, scale=scale) -> object:
            return partial_attention(
                q_TqC, kv_PADkC, scales_PADk, *table, scale, value_size, max_rows=1, most_tokens=tokens
            )

        results.append(measure(f"decode {shape}", num_bytes, attend, repeats))
        if scales_PADk is None and arrays == 2 and (call := flashinfer_decode(q_TqC, kv_PADkC, blocks_BJ)) is not None:
            results.append(measure(f"FlashInfer {shape}", num_bytes, call, repeats, capture=False))
    return results


def chunk(rows: int, tokens: int, query_heads: int, kv_heads: int, repeats: int) -> Result:
    """The last `rows` of a prompt of so many tokens; the bytes are those of the KV."""
    from longhelix.compute.kernels.triton import partial_attention

    num_blocks, channels = tokens // BLOCK_TOKENS, 128
    kv_PADkC, _ = random_pool((num_blocks, 2, BLOCK_TOKENS, kv_heads, channels), torch.bfloat16)
    starts_B = torch.tensor([0, rows], device="cuda")
    limits_T = torch.arange(tokens - rows + 1, tokens + 1, device="cuda")
    table = (
        torch.randperm(num_blocks, device="cuda"),
        torch.tensor([[0, num_blocks]], device="cuda"),
        starts_B,
        limits_T,
    )
    q_TqC = torch.randn(rows, query_heads, channels, device="cuda", dtype=torch.bfloat16)
    flops = 4 * channels * query_heads * int(limits_T.sum())

    def attend() -> object:
        return partial_attention(
            q_TqC, kv_PADkC, None, *table, channels**-0.5, channels, max_rows=rows, most_tokens=tokens
        )

    name = f"chunk {rows} x {tokens}, {query_heads}/{kv_heads} heads of {channels}, bfloat16"
    return measure(name, kv_PADkC.nbytes, attend, repeats, flops=flops)


def experts(
    rows: int, per_row: int, held: int, num_experts: int, hidden: int, columns: int, repeats: int
) -> list[Result]:
    """`held` of `num_experts`; the bytes are those of the experts that some row takes. Then the reference, which takes
    them one by one."""
    from longhelix.compute.kernels import PLAIN, Experts, Weight, run_experts

    def weights(*size: int) -> tuple[Weight, ...]:
        made = (torch.randn(*size, device="cuda", dtype=torch.bfloat16) / size[1] ** 0.5 for _ in range(held))
        return tuple(Weight(weight, "bfloat16", *size, PLAIN) for weight in made)

    ids, x_TH = tuple(range(held)), torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    grouped = Experts.of(ids, weights(2 * columns, hidden), weights(hidden, columns), num_experts, x_TH.device)
    one_by_one = Experts(ids, grouped.gate_up, grouped.down, torch.zeros_like(grouped.rows_e))
    experts_TY = torch.rand(rows, num_experts, device="cuda").topk(per_row, dim=1).indices
    weights_TY, norm = torch.rand(rows, per_row, device="cuda"), torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    pairs, taken = int((experts_TY < held).sum()), int(experts_TY[experts_TY < held].unique().numel())
    num_bytes, flops = taken * 3 * hidden * columns * 2, pairs * 6 * hidden * columns
    shape = f"{rows} rows x {per_row} of {num_experts}, {held} here, {hidden} x {columns}, bfloat16"
    results = []
    for name, own in (("experts", grouped), ("experts one by one", one_by_one)):

        def run(own: Experts = own) -> object:
            return run_experts(x_TH, own, weights_TY, experts_TY, norm=norm, norm_eps=1e-6, residual=x_TH)

        results.append(measure(f"{name} {shape}", num_bytes, run, repeats, capture=own is grouped, flops=flops))
    return results


def packed_products(name: str, outputs: int, depth: int, repeats: int, rounds_inputs: bool = False) -> list[Result]:
    """Products with several weights of a packed format, or with bfloat16 by torch; the bytes are those of the
    weights. rounds_inputs: they multiply FP8."""
    from longhelix.compute.kernels.triton import multiply_packed

    if name == "bfloat16":
        count = -(-PACKED_BYTES // (2 * outputs * depth))
        weights = [torch.randn(outputs, depth, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
        num_bytes, multiply = count * weights[0].nbytes, torch.nn.functional.linear
    else:
        count = -(-PACKED_BYTES // (outputs * FORMATS[name].weight_row_bytes(depth)))
        weights = [packed_rows(name, outputs, depth) for _ in range(count)]
        num_bytes = count * weights[0].buffer.nbytes

        def multiply(x_TX: Tensor, weight: PackedRows) -> Tensor:
            return multiply_packed(x_TX, weight, x_TX.dtype, rounds_inputs=rounds_inputs)

    results = []
    for rows in PACKED_ROWS:
        x_TX = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)

        def call(x_TX: Tensor = x_TX) -> None:
            for weight in weights:
                multiply(x_TX, weight)

        shape = f"{rows} rows x {count} of {outputs} x {depth}, {name}{' in FP8' if rounds_inputs else ''}"
        results.append(measure(f"products {shape}", num_bytes, call, repeats, flops=2 * rows * count * outputs * depth))
    return results


def packed_experts(
    rows: int,
    per_row: int,
    held: int,
    num_experts: int,
    hidden: int,
    columns: int,
    name: str,
    repeats: int,
    rounds_inputs: bool = False,
) -> Result:
    """As `experts`, with packed weights. rounds_inputs: their products multiply FP8."""
    from longhelix.compute.kernels.experts import SWIGLU
    from longhelix.compute.kernels.triton import run_experts

    gate_up = [packed_rows(name, 2 * columns, hidden) for _ in range(held)]
    down = [packed_rows(name, hidden, columns) for _ in range(held)]
    table = [(a.buffer.data_ptr(), b.buffer.data_ptr(), columns) for a, b in zip(gate_up, down, strict=True)]
    weights_e3 = torch.tensor(table, device="cuda")
    index_E = torch.full((num_experts,), -1, dtype=torch.int32, device="cuda")
    index_E[:held] = torch.arange(held, device="cuda")
    x_TH = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
    norm = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)
    experts_TY = torch.rand(rows, num_experts, device="cuda").topk(per_row, dim=1).indices
    weights_TY, rows_e = torch.rand(rows, per_row, device="cuda"), torch.zeros(held, dtype=torch.int64, device="cuda")
    pairs, taken = int((experts_TY < held).sum()), int(experts_TY[experts_TY < held].unique().numel())

    def run() -> object:
        routing = weights_TY, experts_TY, rows_e, SWIGLU
        own = index_E, weights_e3, [columns] * held
        return run_experts(x_TH, *own, *routing, norm, 1e-6, x_TH, name, rounds_inputs=rounds_inputs)

    num_bytes = taken * (gate_up[0].buffer.nbytes + down[0].buffer.nbytes)
    shape = f"{rows} rows x {per_row} of {num_experts}, {held} here, {hidden} x {columns}, {name}"
    shape += " in FP8" if rounds_inputs else ""
    return measure(f"experts {shape}", num_bytes, run, repeats, flops=pairs * 6 * hidden * columns)


def packed_rows(name: str, outputs: int, depth: int) -> PackedRows:
    """A packed weight of random bytes."""
    rows = PackedRows.empty(name, outputs, depth, 0, torch.device("cuda"))
    rows.buffer.random_(0, 256)
    return rows


def flashinfer_decode(q_TqC: Tensor, kv_PADkC: Tensor, blocks_BJ: Tensor) -> Callable[[], object] | None:
    """FlashInfer's decode with LSE over the same pool, planned once; None where it is not installed."""
    try:
        import flashinfer
    except ImportError:
        return None
    rows, blocks = blocks_BJ.shape
    workspace = torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    _, query_heads, head_size = q_TqC.shape
    wrapper.plan(
        torch.arange(rows + 1, dtype=torch.int32) * blocks,
        blocks_BJ.flatten().to(torch.int32),
        torch.full((rows,), BLOCK_TOKENS, dtype=torch.int32),
        query_heads,
        kv_PADkC.shape[3],
        head_size,
        BLOCK_TOKENS,
        q_data_type=q_TqC.dtype,
        kv_data_type=kv_PADkC.dtype,
    )
    return lambda: wrapper.run(q_TqC, kv_PADkC, return_lse=True)


def merge(shards: int, rows: int, heads: int, channels: int, repeats: int) -> Result:
    from longhelix.compute.kernels.triton import merge_states

    out_NTQC = torch.randn(shards, rows, heads, channels, device="cuda", dtype=torch.bfloat16)
    lse_NTQ = torch.randn(shards, rows, heads, device="cuda")
    num_bytes = (out_NTQC.nbytes + lse_NTQ.nbytes) * (shards + 1) // shards
    name = f"merge {shards} x {rows} rows, {heads} heads of {channels}, bfloat16"
    return measure(name, num_bytes, lambda: merge_states(out_NTQC, lse_NTQ), repeats)


def write(rows: int, kv_heads: int, channels: int, dtype: torch.dtype, repeats: int) -> Result:
    from longhelix.compute.kernels.triton import write_kv

    k_TkC, v_TkC = torch.randn(2, rows, kv_heads, channels, device="cuda", dtype=torch.bfloat16)
    kv_PADkC, scales_PADk = random_pool((rows // BLOCK_TOKENS, 2, BLOCK_TOKENS, kv_heads, channels), dtype)
    slots_T = torch.arange(rows, device="cuda").view(-1, BLOCK_TOKENS)[torch.randperm(rows // BLOCK_TOKENS)].flatten()
    num_bytes = k_TkC.nbytes * 2 + kv_PADkC.nbytes + (0 if scales_PADk is None else scales_PADk.nbytes)
    name = f"write {rows} rows, {kv_heads} heads of {channels}, {str(dtype)[6:]}"
    return measure(name, num_bytes, lambda: write_kv(k_TkC, v_TkC, kv_PADkC, scales_PADk, slots_T), repeats)


def environment() -> dict[str, object]:
    import triton

    device = torch.cuda.get_device_properties(0)
    return {
        "gpu": device.name,
        "multiprocessors": device.multi_processor_count,
        "memory_bytes": device.total_memory,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


def table(environment: dict[str, object], read: float, copy: float, results: list[Result], repeats: int) -> str:
    lines = [
        f"{environment['gpu']}, torch {environment['torch']}, Triton {environment['triton']}, CUDA "
        f"{environment['cuda']}; medians of {repeats} repeats. Read bandwidth {read:.0f} GB/s (a sum over 4 GiB), copy "
        f"{copy:.0f} GB/s (reads and writes). Decode and chunks: rows x tokens, bytes of KV alone. Experts: bytes of "
        "those that some row takes. Products: bytes of the weights. GB/s by graph replay, where there is one.",
        "",
        "| op | MB | eager, us | graph, us | launch on host, us | GB/s | of read bandwidth | TFLOP/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        graph = "" if result.graph_us is None else f"{result.graph_us:.1f}"
        lines.append(
            f"| {result.name} | {result.bytes / 1e6:.0f} | {result.eager_us:.1f} | {graph} | {result.host_us:.0f} | "
            f"{result.gigabytes_per_s:.0f} | {result.gigabytes_per_s / read:.0%} | "
            f"{f'{result.teraflops_per_s:.0f}' if result.flops else ''} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="a Markdown file; the JSON goes beside it, with suffix .json")
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("There is no CUDA device that torch can use: nothing to measure.")
        return
    torch.manual_seed(0)
    repeats = arguments.repeats
    conditions = environment()
    print(conditions["gpu"], file=sys.stderr)
    read, copy = ceilings(repeats)
    results = []
    for kv_heads, head_size, dtype in GQA:
        results += decode(kv_heads, GROUP, head_size, head_size, dtype, repeats)
    results += decode(1, 128, 576, 512, torch.bfloat16, repeats)
    results += [chunk(512, tokens, 8, 1, repeats) for tokens in (2**12, 2**14, 2**16)]  # of one rank at TPA 8
    results += [chunk(512, tokens, 64, 8, repeats) for tokens in (2**12, 2**14)]
    for rows in (1, 16, 64, 512, 4096):
        results += experts(rows, 8, 32, 256, 7168, 2048, repeats)  # DeepSeek-R1 over EP = 8
        results += experts(rows, 2, 8, 8, 4096, 14336, repeats)  # Mixtral
    arithmetics = *((name, False) for name in PACKED), *((name, True) for name in ACTIVATION_DTYPES["fp8"])
    for name, rounds_inputs in (("bfloat16", False), *arithmetics):
        for outputs, depth in PACKED_SIZES:
            results += packed_products(name, outputs, depth, repeats, rounds_inputs)
    for name, rounds_inputs in arithmetics:
        for rows in (1, 16, 64, 512, 4096):
            results.append(packed_experts(rows, 8, 32, 256, 7168, 2048, name, repeats, rounds_inputs))
    results += [merge(8, 4096, 16, 128, repeats), merge(16, 1024, 16, 512, repeats)]
    results += [write(2**16, 8, 128, dtype, repeats) for dtype in (torch.bfloat16, torch.float8_e4m3fn)]
    text = table(conditions, read, copy, results, repeats)
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)
        record = {
            "environment": conditions,
            "repeats": repeats,
            "read_gigabytes_per_s": read,
            "copy_gigabytes_per_s": copy,
            "results": [asdict(result) | {"gigabytes_per_s": result.gigabytes_per_s} for result in results],
        }
        arguments.out.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
