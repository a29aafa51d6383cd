"""Write rows of keys and values into a paged pool, quantised where the pool has 8 bits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhelix.compute.kernels.triton import nvfp4

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def write_kv(
    k_TkC: Tensor, v_TkC: Tensor | None, kv_PADkC: Tensor, scales_PADk: Tensor | None, slots_T: Tensor
) -> None:
    """Write the rows that this rank owns into one layer's pool, in the pool's dtype.

    Triton form of `kernels.write.write_kv` for one pool.

    k_TkC, v_TkC (any float dtype): channels contiguous; v_TkC is None where A is 1. slots_T (int64): block id * D +
    offset in the block, which is not checked, or -1 for a row that another rank owns. An int8 or float8_e4m3fn pool
    gets one float32 scale per row and KV head, its largest magnitude / 127 or / 448, and quotients rounded to nearest
    even; a row of zeros gets scale 0. A uint8 pool is nvfp4 (`numbers.Nvfp4`), with scales in uint8.
    """
    num_rows, num_kv_heads, channels = k_TkC.shape
    _, num_arrays, block_tokens, _, _ = kv_PADkC.shape
    assert (v_TkC is None) == (num_arrays == 1)
    is_nvfp4 = kv_PADkC.dtype == torch.uint8
    assert (scales_PADk is None) == (kv_PADkC.dtype not in _LARGEST and not is_nvfp4)
    assert kv_PADkC.is_contiguous()
    if num_rows == 0:
        return
    v_TkC = k_TkC if v_TkC is None else v_TkC
    assert k_TkC.stride(2) == v_TkC.stride(2) == 1
    if is_nvfp4:
        assert channels % 16 == 0
        _write_nvfp4[num_rows, num_kv_heads, num_arrays](
            k_TkC,
            v_TkC,
            kv_PADkC,
            scales_PADk,
            slots_T,
            *k_TkC.stride()[:2],
            *v_TkC.stride()[:2],
            A=num_arrays,
            D=block_tokens,
            K=num_kv_heads,
            G=channels // 16,
            PADDED=triton.next_power_of_2(channels // 16),
            num_warps=1,
            enable_fp_fusion=False,
        )
        return
    _write_kv[num_rows, num_kv_heads](
        k_TkC,
        v_TkC,
        kv_PADkC,
        scales_PADk,
        slots_T,
        *k_TkC.stride()[:2],
        *v_TkC.stride()[:2],
        A=num_arrays,
        D=block_tokens,
        K=num_kv_heads,
        C=channels,
        PADDED=triton.next_power_of_2(channels),
        LARGEST=_LARGEST.get(kv_PADkC.dtype),
        num_warps=1,
    )


@triton.jit
def _write_kv(
    k_ptr,
    v_ptr,
    kv_ptr,
    scales_ptr,
    slots_ptr,
    k_stride_T,
    k_stride_k,
    v_stride_T,
    v_stride_k,
    A: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    PADDED: tl.constexpr,
    LARGEST: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    place = (slot // D * (A * D) + slot % D) * K + head
    _write(k_ptr + row * k_stride_T + head * k_stride_k, kv_ptr, scales_ptr, place, C, PADDED, LARGEST)
    if A == 2:
        _write(v_ptr + row * v_stride_T + head * v_stride_k, kv_ptr, scales_ptr, place + D * K, C, PADDED, LARGEST)


@triton.jit
def _write(row_ptr, kv_ptr, scales_ptr, place, C: tl.constexpr, PADDED: tl.constexpr, LARGEST: tl.constexpr):
    c_C = tl.arange(0, PADDED)
    row_C = tl.load(row_ptr + c_C, mask=c_C < C, other=0.0).to(tl.float32)
    if scales_ptr is not None:
        scale = tl.div_rn(tl.max(tl.abs(row_C), 0), LARGEST)
        tl.store(scales_ptr + place, scale)
        row_C = tl.div_rn(row_C, tl.where(scale == 0, 1.0, scale))
        # A scale below the normal numbers is coarse, and quotients may exceed the largest.
        row_C = tl.minimum(tl.maximum(row_C, -LARGEST), LARGEST)
        if kv_ptr.dtype.element_ty == tl.int8:
            # At 1.5 * 2 ** 23 the next float32 is 1 away: the sum rounds to an integer, to nearest even.
            row_C = (row_C + 12582912.0) - 12582912.0
    tl.store(kv_ptr + place * C + c_C, row_C.to(kv_ptr.dtype.element_ty), mask=c_C < C)


@triton.jit
def _write_nvfp4(
    k_ptr,
    v_ptr,
    kv_ptr,
    scales_ptr,
    slots_ptr,
    k_stride_T,
    k_stride_k,
    v_stride_T,
    v_stride_k,
    A: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    PADDED: tl.constexpr,
):
    row, head, array = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots_ptr + row)
    if slot < 0:
        return
    place = ((slot // D * A + array) * D + slot % D) * K + head
    row_ptr = k_ptr + row * k_stride_T + head * k_stride_k
    if array == 1:
        row_ptr = v_ptr + row * v_stride_T + head * v_stride_k
    g_G = tl.arange(0, PADDED)
    real_G = g_G < G
    c_G8 = g_G[:, None] * 16 + tl.arange(0, 8)[None, :]
    low_G8 = tl.load(row_ptr + c_G8, mask=real_G[:, None], other=0.0).to(tl.float32)
    high_G8 = tl.load(row_ptr + c_G8 + 8, mask=real_G[:, None], other=0.0).to(tl.float32)
    # Magnitudes are ordered as their bits are, and NaN is above all.
    bits_G = tl.maximum(tl.max(_magnitude_bits(low_G8), 1), tl.max(_magnitude_bits(high_G8), 1))
    bits = tl.max(bits_G, 0)
    finite = bits < 0x7F800000
    exponent = (tl.div_rn(bits.to(tl.float32, bitcast=True), 6.0).to(tl.int32, bitcast=True) >> 23) - 7
    exponent = tl.where(finite, tl.maximum(exponent, 11), 255)
    inverse = tl.where(finite, (254 - exponent) << 23, 0).to(tl.float32, bitcast=True)
    most_G = tl.where(finite, bits_G.to(tl.float32, bitcast=True) * inverse, 0.0)
    low_G8, high_G8 = tl.where(finite, low_G8 * inverse, 0.0), tl.where(finite, high_G8 * inverse, 0.0)
    scales_G, codes_G8, errors_G = _rounded_blocks(low_G8, high_G8, most_G, 6.0)
    other_scales_G, other_codes_G8, other_errors_G = _rounded_blocks(low_G8, high_G8, most_G, 4.0)
    better_G = other_errors_G < errors_G
    scales_G = tl.where(better_G, other_scales_G, scales_G)
    codes_G8 = tl.where(better_G[:, None], other_codes_G8, codes_G8)
    byte_G8 = g_G[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(kv_ptr + place * (G * 8) + byte_G8, codes_G8.to(tl.uint8), mask=real_G[:, None])
    scales_ptr += place * (G + 1)
    tl.store(scales_ptr + g_G, scales_G.to(tl.uint8), mask=real_G)
    tl.store(scales_ptr + G, exponent.to(tl.uint8))


@triton.jit
def _magnitude_bits(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _rounded_blocks(low_G8, high_G8, most_G, largest: tl.constexpr):
    """Scales, codes of both halves, and sums of squared errors, if the largest number of a block becomes `largest`."""
    scales_G = nvfp4.e4m3_codes(tl.div_rn(most_G, tl.full(most_G.shape, largest, tl.float32)))
    each_G1 = nvfp4.e4m3_numbers(scales_G)[:, None]
    divisors_G1 = tl.where(each_G1 == 0, float("inf"), each_G1)
    low_codes_G8 = nvfp4.e2m1_codes(tl.div_rn(low_G8, tl.broadcast_to(divisors_G1, low_G8.shape)))
    high_codes_G8 = nvfp4.e2m1_codes(tl.div_rn(high_G8, tl.broadcast_to(divisors_G1, high_G8.shape)))
    low_G8 -= nvfp4.e2m1_numbers(low_codes_G8) * each_G1
    high_G8 -= nvfp4.e2m1_numbers(high_codes_G8) * each_G1
    errors_G = tl.sum(low_G8 * low_G8 + high_G8 * high_G8, 1)
    return scales_G, low_codes_G8 | (high_codes_G8 << 4), errors_G
