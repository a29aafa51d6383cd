"""Products of rows with packed weights. Kernels unpack numbers in registers.

A program multiplies some rows with the weights of some outputs. If there are few outputs, several programs share the
inputs of a tile, and a second launch adds their sums in order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhelix.compute.kernels.library import dense_rows
from longhelix.compute.kernels.packed_rows import PackedRows
from longhelix.compute.kernels.triton.weight_tiles import (
    ALIGNED_BYTES,
    FLOAT32_TILE,
    PACKED_TILES,
    ROUNDING_TILES,
    ProductTile,
    add_products,
    packing,
    scale_outputs,
)

# Six programs for each multiprocessor of a large GPU. Two would not keep its memory busy: a turn loads few bytes.
_PROGRAMS = 792
_SPLIT_TURNS = 4  # Loads run ahead of the products only if a program has several turns.


def multiply_packed(
    x_TX: Tensor, rows: PackedRows, dtype: torch.dtype, bias: Tensor | None = None, rounds_inputs: bool = False
) -> Tensor:
    """Return x W^T + bias. Sums are float32 and rounded once.

    Args:
        x_TX: Rows in float32, bfloat16 or float16.
        rows: W. Its buffer begins at a multiple of 16 bytes.
        dtype: Dtype of the result.
        bias: One number per output, in any float dtype.
        rounds_inputs: Round x as `reference.round_inputs`, and multiply in e4m3. W has codes in e4m3, and scale blocks
            of 128 inputs or more.
    """
    assert rows.buffer.data_ptr() % ALIGNED_BYTES == 0
    x_TX, num_rows = dense_rows(x_TX), len(x_TX)
    out_TO = x_TX.new_empty(num_rows, rows.outputs, dtype=dtype)
    if out_TO.numel() == 0:
        return out_TO
    bias = None if bias is None else bias.contiguous()
    tile = FLOAT32_TILE
    if rounds_inputs or x_TX.dtype != torch.float32:
        tiles = ROUNDING_TILES if rounds_inputs else PACKED_TILES
        tile = next(tile for most_rows, tile in tiles.items() if num_rows <= most_rows)
    tiles = triton.cdiv(num_rows, tile.rows), triton.cdiv(rows.outputs, tile.columns)
    splits, split_inputs = _splits(rows.lead + rows.depth, tiles[0] * tiles[1], tile)
    parts_NTO = out_TO if splits == 1 else x_TX.new_empty(splits, *out_TO.shape, dtype=torch.float32)
    _multiply[(*tiles, splits)](
        x_TX,
        rows.buffer,
        bias if splits == 1 else None,
        parts_NTO,
        num_rows,
        x_TX.stride(0),
        rows.outputs,
        rows.depth,
        rows.lead,
        split_inputs,
        M=tile.rows,
        N=tile.columns,
        C=tile.inputs,
        **packing(rows.dtype, [(rows.depth, rows.lead)], x_TX.device, rounds_inputs),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        _sum_splits[triton.cdiv(out_TO.numel(), 1024),](
            parts_NTO, bias, out_TO, out_TO.numel(), rows.outputs, splits, X=1024
        )
    return out_TO


def _splits(inputs: int, tiles: int, tile: ProductTile) -> tuple[int, int]:
    """Return how many programs share the inputs of a tile of the result, and how many inputs each of them has."""
    turns = max(triton.cdiv(inputs, tile.inputs), 1)
    split_turns = triton.cdiv(turns, max(min(_PROGRAMS // tiles, turns // _SPLIT_TURNS), 1))
    return triton.cdiv(turns, split_turns), split_turns * tile.inputs


@triton.jit(do_not_specialize=["num_rows"])
def _multiply(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    x_stride,
    outputs,
    depth,
    lead,
    split_inputs,
    M: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    ZERO: tl.constexpr,
    ZERO_POINTS: tl.constexpr,
    OFFSETS: tl.constexpr,
    SUPERBLOCK: tl.constexpr,
    OUTPUT_SCALES: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROUNDS_INPUTS: tl.constexpr,
):
    """Multiply M rows with the weights of N outputs, over one split of the inputs."""
    m_M = tl.program_id(0) * M + tl.arange(0, M)
    n_N = tl.program_id(1) * N + tl.arange(0, N)
    split = tl.program_id(2)
    real_M, real_N = m_M < num_rows, n_N < outputs
    sum_MN = tl.zeros([M, N], tl.float32)
    for start in range(split * split_inputs, tl.minimum((split + 1) * split_inputs, lead + depth), C):
        i_C = start - lead + tl.arange(0, C)
        real_MC = real_M[:, None] & ((i_C >= 0) & (i_C < depth))[None, :]
        x_MC = tl.load(x_ptr + m_M.to(tl.int64)[:, None] * x_stride + i_C[None, :], mask=real_MC, other=0.0)
        sum_MN = add_products(
            sum_MN,
            x_MC,
            weight_ptr,
            outputs,
            depth,
            lead,
            n_N,
            real_N,
            start,
            ELEMENT,
            SCALE,
            BLOCK,
            ZERO,
            ZERO_POINTS,
            OFFSETS,
            SUPERBLOCK,
            ALIGNED,
            ROUNDS_INPUTS,
        )
    sum_MN = scale_outputs(
        sum_MN,
        weight_ptr,
        outputs,
        depth,
        lead,
        n_N,
        real_N,
        ELEMENT,
        SCALE,
        BLOCK,
        ZERO_POINTS,
        OFFSETS,
        SUPERBLOCK,
        OUTPUT_SCALES,
        ALIGNED,
    )
    if bias_ptr is not None:
        sum_MN += tl.load(bias_ptr + n_N, mask=real_N, other=0.0).to(tl.float32)[None, :]
    row_M = split.to(tl.int64) * num_rows + m_M
    out_ptrs = out_ptr + row_M[:, None] * outputs + n_N[None, :]
    tl.store(out_ptrs, sum_MN.to(out_ptr.dtype.element_ty), mask=real_M[:, None] & real_N[None, :])


@triton.jit(do_not_specialize=["num_numbers", "splits"])
def _sum_splits(parts_ptr, bias_ptr, out_ptr, num_numbers, outputs, splits, X: tl.constexpr):
    """Add the parts of X numbers of the result, in order."""
    x_X = tl.program_id(0) * X + tl.arange(0, X)
    real_X = x_X < num_numbers
    sum_X = tl.zeros([X], tl.float32)
    for split in range(splits):
        sum_X += tl.load(parts_ptr + tl.cast(split, tl.int64) * num_numbers + x_X, mask=real_X, other=0.0)
    if bias_ptr is not None:
        sum_X += tl.load(bias_ptr + x_X % outputs, mask=real_X, other=0.0).to(tl.float32)
    tl.store(out_ptr + x_X, sum_X.to(out_ptr.dtype.element_ty), mask=real_X)
