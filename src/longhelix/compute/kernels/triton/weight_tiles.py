"""Tiles of weights for products: plain numbers, or numbers of packed rows (`kernels.packed_rows`).

A program multiplies C inputs per turn. Turns begin at multiples of C, counted from the start of a row's first scale
block or superblock. So a tile has whole scale blocks, or is inside one. It is always inside one superblock.
"""

import struct
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from longhelix.compute.kernels.reference import INPUT_BLOCK, LARGEST_ROUNDED, LEAST_ROUNDED
from longhelix.spec import FORMATS, NL4_VALUES

ALIGNED_BYTES = 16  # Loads are wide if weights and their rows begin at multiples of it.

_SCALES = {  # as kernels load them
    "float32": tl.float32,
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
    "e4m3": tl.float8e4nv,
    "e8m0": tl.uint8,
    "int8": tl.int8,
}
# On GPUs without e4m3. No format has scales in e5m2, so this dtype says that the bits are those of e4m3.
_E4M3_BITS = {"e4m3": tl.float8e5}
_SUPERBLOCK_SCALE = "float16"  # the dtype of all scales and offsets of superblocks
# `NL4_VALUES`, four in a word.
_NL4_0, _NL4_4, _NL4_8, _NL4_12 = map(tl.constexpr, struct.unpack("<4i", struct.pack("<16b", *NL4_VALUES)))

_LARGEST_ROUNDED, _LEAST_ROUNDED = tl.constexpr(LARGEST_ROUNDED), tl.constexpr(LEAST_ROUNDED)


class ProductTile(NamedTuple):
    """What a program computes at a time.

    Attributes:
        rows: M, rows of its result.
        columns: N, columns of its result.
        inputs: C, inputs per turn.
        warps: Its warps.
        stages: Turns whose loads are in flight.
    """

    rows: int
    columns: int
    inputs: int
    warps: int
    stages: int


# Tiles for packed weights, by the largest number of rows that uses them. They have fewer columns than tiles for plain
# weights, because unpacking needs registers. A turn has at most 128 inputs, so scales of blocks of 128 multiply sums.
PACKED_TILES = {
    16: ProductTile(rows=16, columns=32, inputs=128, warps=4, stages=4),
    64: ProductTile(rows=64, columns=64, inputs=64, warps=4, stages=4),
    2**30: ProductTile(rows=128, columns=64, inputs=64, warps=8, stages=3),
}
# Full float32 products do not run on tensor cores, and keep their operands in registers.
FLOAT32_TILE = ProductTile(rows=16, columns=16, inputs=32, warps=4, stages=3)
# Tiles for products that round their inputs. A turn is one scale block of inputs, whatever the number of rows, so how a
# row is rounded does not depend on other rows.
ROUNDING_TILES = {
    16: ProductTile(rows=16, columns=32, inputs=INPUT_BLOCK, warps=4, stages=4),
    2**30: ProductTile(rows=64, columns=64, inputs=INPUT_BLOCK, warps=8, stages=3),
}


@cache
def has_e4m3(device: torch.device) -> bool:
    """Return whether kernels on this device have the dtype e4m3. Triton's interpreter has."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def packing(
    dtype: str, inputs: Iterable[tuple[int, int]], device: torch.device, rounds_inputs: bool = False
) -> dict[str, object]:
    """Return the compile-time constants of kernels that read packed weights.

    Args:
        dtype: Name of a number format with codes.
        inputs: Depth and lead (`PackedRows`) of each weight in a launch.
        device: Where the kernels run.
        rounds_inputs: Whether products round their inputs to e4m3.

    Returns:
        ELEMENT: `Codes.element`, or "e4m3_bits" on devices without e4m3.
        SCALE: The dtype in which kernels load scales. On devices without e4m3, its bits are e5m2.
        BLOCK: Inputs of a scale block. 0: each output has one scale.
        ZERO: The zero point of all scale blocks.
        ZERO_POINTS: Whether scale blocks have zero points of their own.
        OFFSETS: Whether scale blocks have offsets.
        SUPERBLOCK: Inputs of a superblock. 0: there are none.
        OUTPUT_SCALES: Whether outputs have a scale besides those of their blocks.
        ALIGNED: Rows and tiles begin at multiples of this number of bytes. 0: a tile may begin in the middle of a byte.
        ROUNDS_INPUTS: Whether products round their inputs to e4m3.
    """
    format, inputs = FORMATS[dtype], tuple(inputs)
    assert format.codes is not None
    assert format.codes.superblock in ("", _SUPERBLOCK_SCALE)
    if all(size * format.bits % (8 * ALIGNED_BYTES) == 0 for pair in inputs for size in pair):
        aligned = ALIGNED_BYTES
    else:
        aligned = int(all(lead * format.bits % 8 == 0 for _, lead in inputs))
    element, scales = format.codes.element, _SCALES
    if not has_e4m3(device):
        element, scales = "e4m3_bits" if element == "e4m3" else element, _SCALES | _E4M3_BITS
    return {
        "ELEMENT": element,
        "SCALE": scales[format.codes.scale],
        "BLOCK": format.weight_scales.numbers or 0,
        "ZERO": format.codes.zero,
        "ZERO_POINTS": format.codes.zero_points,
        "OFFSETS": format.codes.offsets,
        "SUPERBLOCK": format.weight_scales.superblock or 0,
        "OUTPUT_SCALES": format.weight_scales.vector_bits > 0,
        "ALIGNED": aligned,
        "ROUNDS_INPUTS": rounds_inputs,
    }


def plain(aligned: bool) -> dict[str, object]:
    """Return the constants of `packing` for plain weights in the dtype of x. aligned: see `ALIGNED_BYTES`."""
    return {
        "ELEMENT": None,
        "SCALE": None,
        "BLOCK": 0,
        "ZERO": 0,
        "ZERO_POINTS": False,
        "OFFSETS": False,
        "SUPERBLOCK": 0,
        "OUTPUT_SCALES": False,
        "ALIGNED": ALIGNED_BYTES if aligned else 1,
        "ROUNDS_INPUTS": False,
    }


@triton.jit
def add_products(
    sum_MN,
    x_MC,
    weight_ptr,
    outputs,
    depth,
    lead,
    n_N,
    real_N,
    start,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    ZERO: tl.constexpr,
    ZERO_POINTS: tl.constexpr,
    OFFSETS: tl.constexpr,
    SUPERBLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
    ROUNDS_INPUTS: tl.constexpr,
):
    """Add x W^T for outputs n_N and for C inputs from start - lead on. `scale_outputs` completes the sums.

    The scale of a block with at least C inputs multiplies sums, if the block has no offset. Otherwise scales multiply
    numbers, and the result is rounded to the dtype of x. In bfloat16, this is exact for scales in e8m0 and e4m3.

    ROUNDS_INPUTS: Each row of x is rounded to e4m3, and multiplied with codes in e4m3. Its scale multiplies sums.
    """
    C: tl.constexpr = x_MC.shape[1]
    N: tl.constexpr = sum_MN.shape[1]
    SCALES_SUMS: tl.constexpr = BLOCK >= C and not OFFSETS
    if ELEMENT is None:
        number_NC = _plain(weight_ptr, x_MC.dtype, depth, n_N, real_N, start, C, ALIGNED)
    else:
        number_NC = _codes(weight_ptr, depth, lead, n_N, real_N, start, C, ELEMENT, ALIGNED)
        if ROUNDS_INPUTS:
            tl.static_assert(ELEMENT == "e4m3" and (BLOCK == 0 or BLOCK >= C))
            number_NC = number_NC.to(tl.float8e4nv, bitcast=True)
        else:
            number_NC = _numbers(number_NC, ELEMENT)
        if ZERO != 0:
            number_NC -= ZERO
        if BLOCK > 0:
            scales_ptr, sides_ptr, superblocks_ptr, superblock_offsets_ptr, _ = _sections(
                weight_ptr, outputs, depth, lead, ELEMENT, SCALE, BLOCK, ZERO_POINTS, OFFSETS, SUPERBLOCK, ALIGNED
            )
            # Scale blocks of a tile. Rows have no blocks before that of their first input.
            G: tl.constexpr = C // BLOCK if BLOCK < C else 1
            g_G = start // BLOCK - lead // BLOCK + tl.arange(0, G)
            num_blocks = _num_blocks(depth, lead, BLOCK)
            real_NG = real_N[:, None] & ((g_G >= 0) & (g_G < num_blocks))[None, :]
            offset_NG = n_N.to(tl.int64)[:, None] * num_blocks + g_G[None, :]
            scale_NG = _scale(tl.load(scales_ptr + offset_NG, mask=real_NG, other=0.0))
            number_NGB = tl.reshape(number_NC, [N, G, C // G])
            if ZERO_POINTS:
                number_NGB -= tl.load(sides_ptr + offset_NG, mask=real_NG, other=0).to(tl.float32)[:, :, None]
            if OFFSETS:
                side_NG = _scale(tl.load(sides_ptr + offset_NG, mask=real_NG, other=0.0))
            if SUPERBLOCK > 0:
                tl.static_assert(SUPERBLOCK >= C)
                s_N = n_N.to(tl.int64) * _num_superblocks(depth, lead, SUPERBLOCK) + start // SUPERBLOCK
                scale_NG *= tl.load(superblocks_ptr + s_N, mask=real_N, other=0.0).to(tl.float32)[:, None]
                if OFFSETS:
                    side_NG *= tl.load(superblock_offsets_ptr + s_N, mask=real_N, other=0.0).to(tl.float32)[:, None]
            if not SCALES_SUMS:
                number_NGB *= scale_NG[:, :, None]
            if OFFSETS:
                number_NGB += side_NG[:, :, None]
            number_NC = tl.reshape(number_NGB, [N, C])
    if ROUNDS_INPUTS:
        x_MC, scale_M = _rounded(x_MC)
    factor_CN = tl.trans(number_NC.to(x_MC.dtype))
    if ROUNDS_INPUTS or SCALES_SUMS:
        product_MN = tl.dot(x_MC, factor_CN, input_precision="ieee")
        if ROUNDS_INPUTS:
            product_MN *= scale_M[:, None]
        if SCALES_SUMS:
            product_MN *= tl.reshape(scale_NG, [1, N])
        sum_MN += product_MN
    else:
        sum_MN = tl.dot(x_MC, factor_CN, sum_MN, input_precision="ieee")
    return sum_MN


@triton.jit
def scale_outputs(
    sum_MN,
    weight_ptr,
    outputs,
    depth,
    lead,
    n_N,
    real_N,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    ZERO_POINTS: tl.constexpr,
    OFFSETS: tl.constexpr,
    SUPERBLOCK: tl.constexpr,
    OUTPUT_SCALES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Multiply sums by the scales of whole outputs, if there are any."""
    if ELEMENT is not None:
        scales_ptr, _, _, _, output_scales_ptr = _sections(
            weight_ptr, outputs, depth, lead, ELEMENT, SCALE, BLOCK, ZERO_POINTS, OFFSETS, SUPERBLOCK, ALIGNED
        )
        if BLOCK == 0:
            sum_MN *= tl.load(scales_ptr + n_N, mask=real_N, other=0.0)[None, :]
        if OUTPUT_SCALES:
            sum_MN *= tl.load(output_scales_ptr + n_N, mask=real_N, other=0.0)[None, :]
    return sum_MN


@triton.jit
def _rounded(x_MC):
    """Round the inputs of each row to e4m3, and return them with a scale for each row (`reference.round_inputs`)."""
    x_MC = x_MC.to(tl.float32)
    largest_M = tl.maximum(tl.max(tl.abs(x_MC), 1), _LEAST_ROUNDED)
    rounded_MC = (x_MC * tl.div_rn(_LARGEST_ROUNDED, largest_M)[:, None]).to(tl.float8e4nv)
    return rounded_MC, tl.div_rn(largest_M, _LARGEST_ROUNDED)


@triton.jit
def _plain(weight_ptr, DTYPE: tl.constexpr, depth, n_N, real_N, start, C: tl.constexpr, ALIGNED: tl.constexpr):
    """Return numbers (N, C) of a plain weight."""
    numbers_ptr = weight_ptr.to(tl.pointer_type(DTYPE))
    i_C = start + tl.arange(0, C)
    row_N = n_N.to(tl.int64) * depth
    if ALIGNED > 1:
        NUMBERS: tl.constexpr = ALIGNED * 8 // numbers_ptr.dtype.element_ty.primitive_bitwidth
        numbers_ptr, row_N = tl.multiple_of(numbers_ptr, ALIGNED), tl.multiple_of(row_N, NUMBERS)
    real_NC = real_N[:, None] & (i_C < depth)[None, :]
    return tl.load(numbers_ptr + row_N[:, None] + i_C[None, :], mask=real_NC, other=0.0)


@triton.jit
def _codes(
    weight_ptr,
    depth,
    lead,
    n_N,
    real_N,
    start,
    C: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return codes (N, C) in uint8. Codes of inputs outside the row are arbitrary."""
    row_bytes = _row_bytes(depth, ELEMENT, ALIGNED)
    row_N = n_N.to(tl.int64) * row_bytes
    first = start - lead
    if ELEMENT == "uint6":
        high_bytes = row_bytes // 3
        if ALIGNED > 1:
            high_bytes = tl.multiple_of(high_bytes, ALIGNED)
        high_ptr = weight_ptr + 2 * high_bytes
        low_NC = _parts(weight_ptr, row_N, 2 * high_bytes, real_N, first, C, 4, ALIGNED)
        code_NC = low_NC | (_parts(high_ptr, row_N, high_bytes, real_N, first, C, 2, ALIGNED) << 4)
    elif ELEMENT == "uint4" or ELEMENT == "nl4" or ELEMENT == "e2m1":
        code_NC = _parts(weight_ptr, row_N, row_bytes, real_N, first, C, 4, ALIGNED)
    else:
        code_NC = _parts(weight_ptr, row_N, row_bytes, real_N, first, C, 8, ALIGNED)
    return code_NC


@triton.jit
def _parts(
    bytes_ptr,
    row_N,
    row_bytes,
    real_N,
    first,
    C: tl.constexpr,
    BITS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return C numbers of BITS bits (N, C) in uint8, from the number `first` of each row on.

    Args:
        row_N: Where rows begin.
        row_bytes: Bytes of a row with these numbers.
    """
    N: tl.constexpr = row_N.shape[0]
    IN_BYTE: tl.constexpr = 8 // BITS
    if IN_BYTE > 1 and ALIGNED == 0:
        # A byte may have the last number of one tile and the first of the next, so each number loads its byte.
        i_C = first + tl.arange(0, C)
        byte_C = i_C // IN_BYTE
        real_NC = real_N[:, None] & ((i_C >= 0) & (byte_C < row_bytes))[None, :]
        byte_NC = tl.load(bytes_ptr + row_N[:, None] + byte_C[None, :], mask=real_NC, other=0)
        part_NC = (byte_NC >> ((i_C % IN_BYTE) * BITS).to(tl.uint8)[None, :]) & ((1 << BITS) - 1)
    else:
        X: tl.constexpr = C // IN_BYTE
        byte_X = first // IN_BYTE + tl.arange(0, X)
        if ALIGNED > 1:
            row_N = tl.multiple_of(row_N, ALIGNED)
            byte_X = tl.multiple_of(byte_X, ALIGNED if ALIGNED < X else X)
        real_NX = real_N[:, None] & ((byte_X >= 0) & (byte_X < row_bytes))[None, :]
        part_NC = tl.load(bytes_ptr + row_N[:, None] + byte_X[None, :], mask=real_NX, other=0)
        if BITS <= 4:
            part_NC = tl.reshape(tl.join(part_NC & 15, part_NC >> 4), [N, 2 * X])
        if BITS <= 2:
            part_NC = tl.reshape(tl.join(part_NC & 3, part_NC >> 2), [N, C])
    return part_NC


@triton.jit
def _numbers(code_NC, ELEMENT: tl.constexpr):
    """Return the values of codes in float32."""
    if ELEMENT == "e4m3":
        number_NC = code_NC.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif ELEMENT == "e4m3_bits":
        number_NC = _of_e4m3_bits(code_NC)
    elif ELEMENT == "int8":
        number_NC = code_NC.to(tl.int8, bitcast=True).to(tl.float32)
    elif ELEMENT == "uint4" or ELEMENT == "uint6":
        number_NC = code_NC.to(tl.float32)
    elif ELEMENT == "nl4":
        low_NC = tl.where(code_NC < 4, _NL4_0, _NL4_4)
        high_NC = tl.where(code_NC < 12, _NL4_8, _NL4_12)
        word_NC = tl.where(code_NC < 8, low_NC, high_NC)
        number_NC = (word_NC >> ((code_NC & 3).to(tl.int32) * 8)).to(tl.int8).to(tl.float32)
    else:
        # Move the bits of e2m1 to their places in a float32. Its exponents have a bias of 127 instead of 1.
        tl.static_assert(ELEMENT == "e2m1")
        bits_NC = ((code_NC & 7).to(tl.int32) << 22) | ((code_NC & 8).to(tl.int32) << 28)
        number_NC = bits_NC.to(tl.float32, bitcast=True) * 2.0**126
    return number_NC


@triton.jit
def _of_e4m3_bits(bits):
    """Convert e4m3 numbers, given as bytes, to float32. The loader has refused NaN."""
    # Move the bits to their places in a float16. Its exponents have a bias of 15 instead of 7.
    bits = bits.to(tl.int16)
    return (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _scale(scale):
    """Return scales or offsets in float32. uint8 is e8m0. Its code 0 is 2^-127, which is subnormal in float32."""
    if scale.dtype == tl.float8e5:
        scale = _of_e4m3_bits(scale.to(tl.uint8, bitcast=True))
    if scale.dtype == tl.uint8:
        bits = scale.to(tl.int32)
        scale = tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)
    return scale.to(tl.float32)


@triton.jit
def _row_bytes(depth, ELEMENT: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the bytes of a row's codes (`NumberFormat.code_bytes`)."""
    row_bytes = tl.cast(depth, tl.int32)
    if ELEMENT == "uint6":
        row_bytes = (row_bytes + 3) // 4 * 3
    elif ELEMENT == "uint4" or ELEMENT == "nl4" or ELEMENT == "e2m1":
        row_bytes = (row_bytes + 1) // 2
    if ALIGNED > 1:
        row_bytes = tl.multiple_of(row_bytes, ALIGNED)
    return row_bytes


@triton.jit
def _num_blocks(depth, lead, BLOCK: tl.constexpr):
    """Return the number of scale blocks of a row."""
    num_blocks = 1
    if BLOCK > 0:
        num_blocks = (lead % BLOCK + depth + BLOCK - 1) // BLOCK
    return num_blocks


@triton.jit
def _num_superblocks(depth, lead, SUPERBLOCK: tl.constexpr):
    """Return the number of superblocks of a row."""
    num_superblocks = 0
    if SUPERBLOCK > 0:
        num_superblocks = (lead + depth + SUPERBLOCK - 1) // SUPERBLOCK
    return num_superblocks


@triton.jit
def _sections(
    weight_ptr,
    outputs,
    depth,
    lead,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    ZERO_POINTS: tl.constexpr,
    OFFSETS: tl.constexpr,
    SUPERBLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Return the addresses of the sections after codes (`PackedRows`).

    These are scales, zero points or offsets, scales of superblocks, offsets of superblocks, and scales of outputs.
    """
    rows = tl.cast(outputs, tl.int64)
    blocks = rows * _num_blocks(depth, lead, BLOCK)
    superblock_bytes = rows * _num_superblocks(depth, lead, SUPERBLOCK) * 2
    scales_ptr = (weight_ptr + _aligned(rows * _row_bytes(depth, ELEMENT, ALIGNED))).to(tl.pointer_type(SCALE))
    SCALE_BYTES: tl.constexpr = scales_ptr.dtype.element_ty.primitive_bitwidth // 8
    sides_ptr = scales_ptr.to(tl.pointer_type(tl.uint8)) + _aligned(blocks * SCALE_BYTES)
    superblocks_ptr = sides_ptr
    if ZERO_POINTS:
        superblocks_ptr += _aligned(blocks)
    if OFFSETS:
        superblocks_ptr += _aligned(blocks * SCALE_BYTES)
        sides_ptr = sides_ptr.to(tl.pointer_type(SCALE))
    superblock_offsets_ptr = superblocks_ptr + _aligned(superblock_bytes)
    output_scales_ptr = superblock_offsets_ptr
    if OFFSETS:
        output_scales_ptr += _aligned(superblock_bytes)
    superblocks_ptr = superblocks_ptr.to(tl.pointer_type(tl.float16))
    superblock_offsets_ptr = superblock_offsets_ptr.to(tl.pointer_type(tl.float16))
    output_scales_ptr = output_scales_ptr.to(tl.pointer_type(tl.float32))
    return scales_ptr, sides_ptr, superblocks_ptr, superblock_offsets_ptr, output_scales_ptr


@triton.jit
def _aligned(num_bytes):
    return (num_bytes + 255) // 256 * 256
