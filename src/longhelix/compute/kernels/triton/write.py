"""Write rows of keys and values into a paged pool, quantised where the pool has 8 bits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def write_kv(
    k_TkC: Tensor, v_TkC: Tensor | None, kv_PADkC: Tensor, scales_PADk: Tensor | None, slots_T: Tensor
) -> None:
    """Write the rows that this rank owns into one layer's pool, in the pool's dtype.

    Triton form of `kernels.write.write_kv` for one pool.

    k_TkC, v_TkC (any float dtype): channels contiguous; v_TkC is None where A is 1. slots_T (int64): block id * D +
    offset in the block, which is not checked, or -1 for a row that another rank owns. An int8 or float8_e4m3fn pool
    gets one float32 scale per row and KV head, its largest magnitude / 127 or / 448, and quotients rounded to nearest
    even; a row of zeros gets scale 0.
    """
    num_rows, num_kv_heads, channels = k_TkC.shape
    _, num_arrays, block_tokens, _, _ = kv_PADkC.shape
    assert (v_TkC is None) == (num_arrays == 1)
    assert (scales_PADk is None) == (kv_PADkC.dtype not in _LARGEST)
    assert kv_PADkC.is_contiguous()
    if num_rows == 0:
        return
    v_TkC = k_TkC if v_TkC is None else v_TkC
    assert k_TkC.stride(2) == v_TkC.stride(2) == 1
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
