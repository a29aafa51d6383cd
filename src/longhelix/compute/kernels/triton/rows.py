"""What lies between products: norms, activations and rotations of rows, each in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhelix.compute.kernels.triton.activation import activated, gated_input
from longhelix.spec import Activation


def norm_rows(x_TX: Tensor, weight_X: Tensor, eps: float) -> Tensor:
    """RMSNorm (arXiv 1910.07467) of rows, `reference.rms_norm`: any float dtype but float64; channels contiguous. The
    weight has the dtype of the rows, or float32."""
    num_rows, channels = x_TX.shape
    assert weight_X.dtype in (x_TX.dtype, torch.float32)
    out_TX = x_TX.new_empty(num_rows, channels)
    if out_TX.numel():
        assert channels == 1 or x_TX.stride(1) == 1
        _norm_rows[num_rows,](
            x_TX,
            weight_X.contiguous(),
            out_TX,
            x_TX.stride(0),
            eps,
            C=channels,
            PADDED=triton.next_power_of_2(channels),
            num_warps=4 if channels <= 4096 else 8,
            enable_fp_fusion=False,
        )
    return out_TX


@triton.jit
def _norm_rows(x_ptr, weight_ptr, out_ptr, stride, eps, C: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c_C = tl.arange(0, PADDED)
    real_C = c_C < C
    x_C = tl.load(x_ptr + row * stride + c_C, mask=real_C, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x_C * x_C, 0) / C + eps)
    normed_C = (x_C * scale).to(weight_ptr.dtype.element_ty).to(tl.float32)
    weight_C = tl.load(weight_ptr + c_C, mask=real_C, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * C + c_C, (normed_C * weight_C).to(out_ptr.dtype.element_ty), mask=real_C)


def activate_rows(x_TX: Tensor, activation: Activation) -> Tensor:
    """`reference.activate` of rows; each step rounded to the dtype."""
    num_rows, channels = x_TX.shape
    columns = channels // activation.projections
    out_TX = x_TX.new_empty(num_rows, columns)
    if out_TX.numel():
        assert x_TX.stride(1) == 1
        _activate_rows[num_rows, triton.cdiv(columns, 1024)](
            x_TX,
            out_TX,
            x_TX.stride(0),
            C=columns,
            FUNCTION=activation.function,
            GATED=activation.gated,
            X=1024,
        )
    return out_TX


@triton.jit
def _activate_rows(
    x_ptr, out_ptr, stride, C: tl.constexpr, FUNCTION: tl.constexpr, GATED: tl.constexpr, X: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    c_X = tl.program_id(1) * X + tl.arange(0, X)
    real_X = c_X < C
    dtype = out_ptr.dtype.element_ty
    result_X = activated(tl.load(x_ptr + row * stride + c_X, mask=real_X, other=0.0).to(tl.float32), FUNCTION)
    if GATED:
        up_X = tl.load(x_ptr + row * stride + C + c_X, mask=real_X, other=0.0).to(tl.float32)
        input_X = gated_input(up_X, FUNCTION).to(dtype).to(tl.float32)
        result_X = result_X.to(dtype).to(tl.float32) * input_X
    tl.store(out_ptr + row * C + c_X, result_X.to(dtype), mask=real_X)


def rotate(
    qkv_TX: Tensor,
    num_kv_heads: int,
    head_size: int,
    q_norm_C: Tensor | None,
    k_norm_C: Tensor | None,
    norm_eps: float,
    cos_TR: Tensor,
    sin_TR: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """q_TqC, k_TkC and v_TkC, a view: `reference.rotate`. Norms have the dtype of the rows, any float but float64, or
    float32."""
    num_rows, channels = qkv_TX.shape
    num_query_heads = channels // head_size - 2 * num_kv_heads
    num_pairs = cos_TR.shape[1]
    assert cos_TR.shape == sin_TR.shape == (num_rows, num_pairs)
    num_others = head_size - 2 * num_pairs
    q_TqC = qkv_TX.new_empty(num_rows, num_query_heads, head_size)
    k_TkC = qkv_TX.new_empty(num_rows, num_kv_heads, head_size)
    if qkv_TX.numel():
        assert qkv_TX.stride(1) == 1
        _rotate[num_rows, triton.cdiv(num_query_heads + num_kv_heads, 4)](
            qkv_TX,
            None if q_norm_C is None else q_norm_C.contiguous(),
            None if k_norm_C is None else k_norm_C.contiguous(),
            cos_TR.contiguous(),
            sin_TR.contiguous(),
            q_TqC,
            k_TkC,
            qkv_TX.stride(0),
            norm_eps,
            Q=num_query_heads,
            K=num_kv_heads,
            R=num_pairs,
            PADDED=triton.next_power_of_2(max(num_pairs, 1)),
            S=num_others,
            PADDED_S=triton.next_power_of_2(max(num_others, 1)),
            X=4,
            num_warps=1,
            enable_fp_fusion=False,
        )
    return q_TqC, k_TkC, qkv_TX[:, (num_query_heads + num_kv_heads) * head_size :].unflatten(1, (-1, head_size))


@triton.jit
def _rotate(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    stride,
    eps,
    Q: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    PADDED: tl.constexpr,
    S: tl.constexpr,
    PADDED_S: tl.constexpr,
    X: tl.constexpr,
):
    """X heads of one row: channel r is rotated with channel R + r. Each has S more channels."""
    C: tl.constexpr = 2 * R + S
    row = tl.program_id(0).to(tl.int64)
    head_X = tl.program_id(1) * X + tl.arange(0, X)
    r_R = tl.arange(0, PADDED)
    real_R = r_R < R
    real_XR = (head_X < Q + K)[:, None] & real_R[None, :]
    is_query_X1 = (head_X < Q)[:, None]
    first_ptr = qkv_ptr + row * stride + head_X[:, None] * C + r_R[None, :]
    first_XR = tl.load(first_ptr, mask=real_XR, other=0.0).to(tl.float32)
    second_XR = tl.load(first_ptr + R, mask=real_XR, other=0.0).to(tl.float32)
    s_S = tl.arange(0, PADDED_S)
    real_S = s_S < S
    real_XS = (head_X < Q + K)[:, None] & real_S[None, :]
    if S > 0:
        other_ptr = qkv_ptr + row * stride + head_X[:, None] * C + 2 * R + s_S[None, :]
        other_XS = tl.load(other_ptr, mask=real_XS, other=0.0).to(tl.float32)
    dtype = q_ptr.dtype.element_ty
    if q_norm_ptr is not None or k_norm_ptr is not None:
        squares_X = tl.sum(first_XR * first_XR, 1) + tl.sum(second_XR * second_XR, 1)
        if S > 0:
            squares_X += tl.sum(other_XS * other_XS, 1)
        scale_X1 = tl.rsqrt(squares_X / C + eps)[:, None]
        if q_norm_ptr is not None:
            normed_XR = _normed(first_XR, scale_X1, q_norm_ptr + r_R, real_R, dtype)
            first_XR = tl.where(is_query_X1, normed_XR, first_XR)
            normed_XR = _normed(second_XR, scale_X1, q_norm_ptr + R + r_R, real_R, dtype)
            second_XR = tl.where(is_query_X1, normed_XR, second_XR)
            if S > 0:
                normed_XS = _normed(other_XS, scale_X1, q_norm_ptr + 2 * R + s_S, real_S, dtype)
                other_XS = tl.where(is_query_X1, normed_XS, other_XS)
        if k_norm_ptr is not None:
            normed_XR = _normed(first_XR, scale_X1, k_norm_ptr + r_R, real_R, dtype)
            first_XR = tl.where(is_query_X1, first_XR, normed_XR)
            normed_XR = _normed(second_XR, scale_X1, k_norm_ptr + R + r_R, real_R, dtype)
            second_XR = tl.where(is_query_X1, second_XR, normed_XR)
            if S > 0:
                normed_XS = _normed(other_XS, scale_X1, k_norm_ptr + 2 * R + s_S, real_S, dtype)
                other_XS = tl.where(is_query_X1, other_XS, normed_XS)
    cos_R = tl.load(cos_ptr + row * R + r_R, mask=real_R, other=0.0)[None, :]
    sin_R = tl.load(sin_ptr + row * R + r_R, mask=real_R, other=0.0)[None, :]
    turned_first_XR = first_XR * cos_R - second_XR * sin_R
    turned_second_XR = second_XR * cos_R + first_XR * sin_R
    q_row_ptrs = q_ptr + (row * Q + head_X[:, None]) * C
    q_ptrs = q_row_ptrs + r_R[None, :]
    tl.store(q_ptrs, turned_first_XR.to(dtype), mask=real_XR & is_query_X1)
    tl.store(q_ptrs + R, turned_second_XR.to(dtype), mask=real_XR & is_query_X1)
    k_row_ptrs = k_ptr + (row * K + head_X[:, None] - Q) * C
    k_ptrs = k_row_ptrs + r_R[None, :]
    tl.store(k_ptrs, turned_first_XR.to(dtype), mask=real_XR & (head_X >= Q)[:, None])
    tl.store(k_ptrs + R, turned_second_XR.to(dtype), mask=real_XR & (head_X >= Q)[:, None])
    if S > 0:
        others = 2 * R + s_S[None, :]
        tl.store(q_row_ptrs + others, other_XS.to(dtype), mask=real_XS & is_query_X1)
        tl.store(k_row_ptrs + others, other_XS.to(dtype), mask=real_XS & (head_X >= Q)[:, None])


@triton.jit
def _normed(x_XR, scale_X1, weight_ptrs, real_R, dtype: tl.constexpr):
    """As `norm_rows`: rounded to the weight's dtype before the weight, and to the rows' dtype after it."""
    weight_R = tl.load(weight_ptrs, mask=real_R, other=0.0).to(tl.float32)[None, :]
    normed_XR = (x_XR * scale_X1).to(weight_ptrs.dtype.element_ty).to(tl.float32)
    return (normed_XR * weight_R).to(dtype).to(tl.float32)
