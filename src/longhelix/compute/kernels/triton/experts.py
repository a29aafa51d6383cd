"""FFNs with experts as grouped products: rows are sorted by expert on the device, and a program takes some columns of
one expert for a tile of its rows.

Launches follow from shapes alone, nothing is read back, and every sum has one order: a row's experts are summed as it
names them, and its bits depend on no other row's routing.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhelix.compute.kernels.triton.activation import activated, gated_input
from longhelix.compute.kernels.triton.expert_rows import SortedRows, most_places_and_tiles, sort_rows
from longhelix.compute.kernels.triton.weight_tiles import (
    ALIGNED_BYTES,
    FLOAT32_TILE,
    PACKED_TILES,
    ROUNDING_TILES,
    ProductTile,
    add_products,
    packing,
    plain,
    scale_outputs,
)
from longhelix.spec import Activation

_PARTS_BYTES = 256 * 2**20  # for what experts make of their rows, in float32: more hidden channels take turns


# By the mean number of rows of an expert, up to which they serve. Where an expert has few rows, its weights are what is
# read, by many programs of few columns each. Shared memory (227 KB) takes all stages of rows and weights (two: gate and
# up), registers two float32 sums for every row and column.
_TILES = {
    16: ProductTile(rows=16, columns=32, inputs=128, warps=4, stages=4),
    64: ProductTile(rows=64, columns=64, inputs=64, warps=4, stages=4),
    2**30: ProductTile(rows=128, columns=128, inputs=64, warps=8, stages=3),
}
# For few rows, where larger tiles would make too few programs for a large GPU.
_NARROW = ProductTile(rows=16, columns=16, inputs=256, warps=4, stages=4)
_PACKED_NARROW = ProductTile(rows=16, columns=16, inputs=128, warps=4, stages=4)
_PROGRAMS = 264  # two for each multiprocessor

_DOT_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def run_experts(
    x_TH: Tensor,
    index_E: Tensor,
    weights_e3: Tensor,
    columns: Sequence[int],
    weights_TY: Tensor,
    experts_TY: Tensor,
    rows_e: Tensor,
    activation: Activation,
    norm: Tensor | None,
    norm_eps: float,
    residual: Tensor | None,
    weight_dtype: str | None = None,
    lead: int = 0,
    rounds_inputs: bool = False,
) -> Tensor:
    """`kernels.experts.run_experts` of weights in rows, found by `experts.addresses`.

    Args:
        x_TH: float32, bfloat16 or float16.
        columns: Columns of each of this rank's experts.
        weight_dtype: The format of packed weights (`PackedRows`). None: weights are plain, in the dtype of x.
        lead: `PackedRows.lead` of the down-projections of all experts with columns. Other weights have none.
        rounds_inputs: Both products round their inputs, as in `multiply_packed`.

    Sums are float32; between the two products an expert's activations are rounded to the dtype of x. An expert's
    outputs take memory meanwhile: 4 bytes for each hidden channel of each pair that this rank can have, and
    _PARTS_BYTES at most.
    """
    rows, hidden = x_TH.shape
    num_experts = len(rows_e)
    if rows == 0 or num_experts == 0:
        return torch.zeros_like(x_TH) if residual is None else residual.clone()
    most_columns = max(columns)
    if weight_dtype is None:
        aligned = all(size * x_TH.itemsize % ALIGNED_BYTES == 0 for size in (hidden, *columns))
        multiple, constants, tiles, narrow = ALIGNED_BYTES // x_TH.itemsize, plain(aligned), _TILES, _NARROW
    else:
        multiple, constants = (
            ALIGNED_BYTES,
            packing(weight_dtype, [(hidden, 0), *((width, lead) for width in columns)], x_TH.device, rounds_inputs),
        )
        tiles, narrow = ROUNDING_TILES if rounds_inputs else PACKED_TILES, _PACKED_NARROW
    mean_rows = experts_TY.numel() / len(index_E)
    tile = FLOAT32_TILE
    if rounds_inputs or x_TH.dtype != torch.float32:
        tile = _tile(mean_rows, num_experts, most_columns, tiles, narrow)
    taken = sort_rows(experts_TY, index_E, rows_e, tile.rows)
    out_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    if most_columns == 0:
        return out_TH.zero_() if residual is None else out_TH.copy_(residual)
    places, row_tiles = most_places_and_tiles(*experts_TY.shape, num_experts, tile.rows)
    inner_Xf = x_TH.new_empty(places, most_columns)
    shared = {
        "H": hidden,
        "F": most_columns,
        "MULTIPLE": multiple if constants["ALIGNED"] == ALIGNED_BYTES else 1,
        "M": tile.rows,
        "N": tile.columns,
        "C": tile.inputs,
        "DTYPE": _DOT_DTYPES[x_TH.dtype],
        **constants,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    _gate_up[row_tiles, triton.cdiv(most_columns, tile.columns)](
        x_TH.contiguous() if norm is None else _normed(x_TH, norm, norm_eps),
        weights_e3,
        *taken[1:],
        inner_Xf,
        Y=experts_TY.shape[1],
        FUNCTION=activation.function,
        GATED=activation.gated,
        **shared,
    )
    width = _channels_at_once(places, hidden)
    parts_XH = x_TH.new_empty(places, width, dtype=torch.float32)
    for first in range(0, hidden, width):
        channels = min(width, hidden - first)
        _down[row_tiles, triton.cdiv(channels, tile.columns)](
            inner_Xf, weights_e3, *taken[2:], parts_XH, first, width, lead, **shared
        )
        _sum(parts_XH, taken, weights_TY, residual, out_TH, first, channels)
    return out_TH


def _tile(
    mean_rows: float, num_experts: int, columns: int, tiles: dict[int, ProductTile], narrow: ProductTile
) -> ProductTile:
    """For experts that have so many rows each, were they taken evenly."""
    tile = next(tile for most, tile in tiles.items() if mean_rows <= most)
    expected_tiles = num_experts * min(mean_rows, 1.0)
    few = mean_rows <= 1 and expected_tiles * triton.cdiv(columns, tile.columns) < _PROGRAMS
    return narrow if few else tile


def _channels_at_once(places: int, hidden: int) -> int:
    """A multiple of what any tile has of columns."""
    return min(hidden, max(_PARTS_BYTES // (4 * places) // 128 * 128, 128))


def _normed(x_TH: Tensor, norm: Tensor, eps: float) -> Tensor:
    normed_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    rows, hidden = x_TH.shape
    assert x_TH.stride(1) == 1
    _norm[rows,](x_TH, norm, normed_TH, x_TH.stride(0), eps, H=hidden, PADDED=triton.next_power_of_2(hidden))
    return normed_TH


def _sum(
    parts_XH: Tensor,
    taken: SortedRows,
    weights_TY: Tensor,
    residual: Tensor | None,
    out_TH: Tensor,
    first: int,
    channels: int,
) -> None:
    rows, per_row = weights_TY.shape
    residual = None if residual is None else residual.contiguous()
    width = min(1024, triton.next_power_of_2(channels))
    _sum_parts[rows, triton.cdiv(channels, width)](
        parts_XH,
        taken.place_X,
        weights_TY.contiguous(),
        residual,
        out_TH,
        first,
        channels,
        parts_XH.shape[1],
        H=out_TH.shape[1],
        Y=per_row,
        N=width,
        enable_fp_fusion=False,
    )


@triton.jit
def _norm(x_ptr, norm_ptr, normed_ptr, stride_T, eps, H: tl.constexpr, PADDED: tl.constexpr):
    """One row; rounded to the weight's dtype before the weight, as the reference is."""
    row = tl.program_id(0).to(tl.int64)
    h_H = tl.arange(0, PADDED)
    x_H = tl.load(x_ptr + row * stride_T + h_H, mask=h_H < H, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x_H * x_H, 0) / H + eps)
    normed_H = (x_H * scale).to(norm_ptr.dtype.element_ty).to(tl.float32)
    weight_H = tl.load(norm_ptr + h_H, mask=h_H < H, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row * H + h_H, (normed_H * weight_H).to(normed_ptr.dtype.element_ty), mask=h_H < H)


@triton.jit
def _weight(weights_ptr, expert, side, MULTIPLE: tl.constexpr):
    """Where an expert's gate and up (side 0) or down (1) begin, and its columns, which MULTIPLE divides."""
    weight_ptr = tl.load(weights_ptr + 3 * expert + side).to(tl.pointer_type(tl.uint8))
    columns = tl.load(weights_ptr + 3 * expert + 2).to(tl.int32)
    if MULTIPLE > 1:
        weight_ptr, columns = tl.multiple_of(weight_ptr, 16), tl.multiple_of(columns, MULTIPLE)
    return weight_ptr, columns


@triton.jit
def _gate_up(
    x_ptr,
    weights_ptr,
    pair_ptr,
    tiles_ptr,
    num_tiles_ptr,
    inner_ptr,
    Y: tl.constexpr,
    FUNCTION: tl.constexpr,
    GATED: tl.constexpr,
    H: tl.constexpr,
    F: tl.constexpr,
    MULTIPLE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    DTYPE: tl.constexpr,
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
    """What experts make of M rows between their products: N columns. Without a gate, `gate` is the up-projection."""
    tile, n_N = tl.program_id(0), tl.program_id(1) * N + tl.arange(0, N)
    if tile >= tl.load(num_tiles_ptr):
        return
    expert, begin = tl.load(tiles_ptr + 3 * tile), tl.load(tiles_ptr + 3 * tile + 1)
    count = tl.load(tiles_ptr + 3 * tile + 2)
    weight_ptr, columns = _weight(weights_ptr, expert, 0, MULTIPLE)
    if tl.program_id(1) * N >= columns:
        return
    outputs = columns
    if GATED:
        outputs = 2 * columns
    m_M = tl.arange(0, M)
    row_M = tl.load(pair_ptr + begin + m_M, mask=m_M < count, other=0) // Y
    real_N = n_N < columns
    gate_MN = tl.zeros([M, N], tl.float32)
    up_MN = tl.zeros([M, N], tl.float32)
    for start in range(0, H, C):
        h_C = start + tl.arange(0, C)
        x_MC = tl.load(
            x_ptr + row_M.to(tl.int64)[:, None] * H + h_C[None, :],
            mask=(m_M < count)[:, None] & (h_C < H)[None, :],
            other=0.0,
        )
        gate_MN = add_products(
            gate_MN,
            x_MC,
            weight_ptr,
            outputs,
            H,
            0,
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
        if GATED:
            up_MN = add_products(
                up_MN,
                x_MC,
                weight_ptr,
                outputs,
                H,
                0,
                columns + n_N,
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
    gate_MN = scale_outputs(
        gate_MN,
        weight_ptr,
        outputs,
        H,
        0,
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
    if GATED:
        up_MN = scale_outputs(
            up_MN,
            weight_ptr,
            outputs,
            H,
            0,
            columns + n_N,
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
    inner_MN = activated(gate_MN, FUNCTION)
    if GATED:
        inner_MN *= gated_input(up_MN, FUNCTION)
    offset_MN = (begin + m_M).to(tl.int64)[:, None] * F + n_N[None, :]
    tl.store(inner_ptr + offset_MN, inner_MN.to(DTYPE), mask=(m_M < count)[:, None] & real_N[None, :])


@triton.jit
def _down(
    inner_ptr,
    weights_ptr,
    tiles_ptr,
    num_tiles_ptr,
    parts_ptr,
    first,
    width,
    lead,
    H: tl.constexpr,
    F: tl.constexpr,
    MULTIPLE: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    DTYPE: tl.constexpr,
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
    """What an expert makes of M rows: N hidden channels of those from `first` on."""
    tile, n_N = tl.program_id(0), tl.program_id(1) * N + tl.arange(0, N)
    if tile >= tl.load(num_tiles_ptr):
        return
    expert, begin = tl.load(tiles_ptr + 3 * tile), tl.load(tiles_ptr + 3 * tile + 1)
    count = tl.load(tiles_ptr + 3 * tile + 2)
    weight_ptr, columns = _weight(weights_ptr, expert, 1, MULTIPLE)
    lead = tl.where(columns > 0, lead, 0)
    m_M = tl.arange(0, M)
    h_N = first + n_N
    real_N = h_N < H
    part_MN = tl.zeros([M, N], tl.float32)
    for start in range(0, lead + columns, C):
        f_C = start - lead + tl.arange(0, C)
        inner_MC = tl.load(
            inner_ptr + (begin + m_M).to(tl.int64)[:, None] * F + f_C[None, :],
            mask=(m_M < count)[:, None] & ((f_C >= 0) & (f_C < columns))[None, :],
            other=0.0,
        )
        part_MN = add_products(
            part_MN,
            inner_MC,
            weight_ptr,
            H,
            columns,
            lead,
            h_N,
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
    part_MN = scale_outputs(
        part_MN,
        weight_ptr,
        H,
        columns,
        lead,
        h_N,
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
    offset_MN = (begin + m_M).to(tl.int64)[:, None] * width + n_N[None, :]
    real_MN = (m_M < count)[:, None] & (real_N & (n_N < width))[None, :]
    tl.store(parts_ptr + offset_MN, part_MN, mask=real_MN)


@triton.jit
def _sum_parts(
    parts_ptr,
    place_ptr,
    weights_ptr,
    residual_ptr,
    out_ptr,
    first,
    channels,
    width,
    H: tl.constexpr,
    Y: tl.constexpr,
    N: tl.constexpr,
):
    """One row's experts, in the order in which it names them; rounded, and once more with the residual."""
    row, n_N = tl.program_id(0).to(tl.int64), tl.program_id(1) * N + tl.arange(0, N)
    real_N = n_N < channels
    sum_N = tl.zeros([N], tl.float32)
    for y in range(Y):
        place = tl.load(place_ptr + row * Y + y)
        weight = tl.load(weights_ptr + row * Y + y)
        part_N = tl.load(parts_ptr + place.to(tl.int64) * width + n_N, mask=real_N & (place >= 0), other=0.0)
        sum_N += tl.where(place >= 0, weight * part_N, 0.0)
    out_N = sum_N.to(out_ptr.dtype.element_ty)
    at = row * H + first
    if residual_ptr is not None:
        residual_N = tl.load(residual_ptr + at + n_N, mask=real_N, other=0.0)
        out_N = (residual_N.to(tl.float32) + out_N.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at + n_N, out_N, mask=real_N)
