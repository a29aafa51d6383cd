"""Merges of partial states by LSE: of ranks (the op), and of the splits of rows."""

import triton
import triton.language as tl
from torch import Tensor


def merge_states(out_NTQC: Tensor, lse_NTQ: Tensor) -> tuple[Tensor, Tensor]:
    """Merge N partial attentions over disjoint sets of keys, in rank order and in float32.

    Triton form of `kernels.attention.merge_states`.

    Any float dtype but float64 in, the same out: out_TQC, lse_TQ (natural). The output of a shard with LSE -inf is not
    even read; all empty gives 0 and -inf.
    """
    out_NTQC, lse_NTQ = out_NTQC.contiguous(), lse_NTQ.contiguous()
    out_TQC, lse_TQ = out_NTQC.new_empty(out_NTQC.shape[1:]), lse_NTQ.new_empty(lse_NTQ.shape[1:])
    num_states, channels = lse_TQ.numel(), out_TQC.shape[-1]
    if num_states == 0:
        return out_TQC, lse_TQ
    padded = triton.next_power_of_2(channels)
    states = max(1, 512 // padded)
    _merge_states[triton.cdiv(num_states, states),](
        out_NTQC,
        lse_NTQ,
        out_TQC,
        lse_TQ,
        num_states,
        NUM_SHARDS=lse_NTQ.shape[0],
        C=channels,
        PADDED=padded,
        X=states,
        enable_fp_fusion=False,
    )
    return out_TQC, lse_TQ


@triton.jit(do_not_specialize=["num_states"])
def _merge_states(
    out_ptr,
    lse_ptr,
    merged_out_ptr,
    merged_lse_ptr,
    num_states,
    NUM_SHARDS: tl.constexpr,
    C: tl.constexpr,
    PADDED: tl.constexpr,
    X: tl.constexpr,
):
    x_X = (tl.program_id(0) * X + tl.arange(0, X)).to(tl.int64)
    real_X = x_X < num_states
    largest_X = tl.full([X], float("-inf"), tl.float32)
    state_X = x_X
    for _ in range(NUM_SHARDS):
        lse_X = tl.load(lse_ptr + state_X, mask=real_X, other=float("-inf")).to(tl.float32)
        largest_X = tl.maximum(largest_X, lse_X)
        state_X += num_states
    # Where all shards are empty, any finite base makes every weight exp(-inf) = 0.
    base_X = tl.where(largest_X == float("-inf"), 0.0, largest_X)
    c_C = tl.arange(0, PADDED)
    real_C = c_C < C
    total_X = tl.zeros([X], tl.float32)
    sum_XC = tl.zeros([X, PADDED], tl.float32)
    state_X = x_X
    for _ in range(NUM_SHARDS):
        lse_X = tl.load(lse_ptr + state_X, mask=real_X, other=float("-inf")).to(tl.float32)
        weight_X = tl.exp(lse_X - base_X)
        mask_XC = (lse_X != float("-inf"))[:, None] & real_C[None, :]
        out_XC = tl.load(out_ptr + state_X[:, None] * C + c_C[None, :], mask=mask_XC, other=0.0).to(tl.float32)
        sum_XC += weight_X[:, None] * out_XC
        total_X += weight_X
        state_X += num_states
    lse_X = base_X + tl.log(total_X)
    tl.store(merged_lse_ptr + x_X, lse_X.to(merged_lse_ptr.dtype.element_ty), mask=real_X)
    out_XC = tl.div_rn(sum_XC, tl.where(total_X == 0, 1.0, total_X)[:, None])
    mask_XC = real_X[:, None] & real_C[None, :]
    merged_out_ptrs_XC = merged_out_ptr + x_X[:, None] * C + c_C[None, :]
    tl.store(merged_out_ptrs_XC, out_XC.to(merged_out_ptr.dtype.element_ty), mask=mask_XC)


def merge_splits(
    out_NTqC: Tensor,
    lse_NTq: Tensor,
    firsts_T: Tensor | None,
    limits_T: Tensor,
    split_tokens: int,
    out_TqC: Tensor,
    lse_Tq: Tensor,
) -> None:
    """Merge the states of N splits (float32) of some rows into out_TqC, lse_Tq.

    Which splits hold a state follows from firsts_T and limits_T, see `kernels.attention.partial_attention`.
    """
    _, num_rows, num_query_heads, value_size = out_NTqC.shape
    padded = triton.next_power_of_2(value_size)
    _merge_splits[num_rows, num_query_heads](
        out_NTqC,
        lse_NTq,
        firsts_T,
        limits_T,
        out_TqC,
        lse_Tq,
        SPLIT=split_tokens,
        Q=num_query_heads,
        V=value_size,
        PADDED=padded,
        N=max(16, 8192 // padded),
        enable_fp_fusion=False,
    )


@triton.jit
def _merge_splits(
    out_ptr,
    lse_ptr,
    firsts_ptr,
    limits_ptr,
    merged_out_ptr,
    merged_lse_ptr,
    SPLIT: tl.constexpr,
    Q: tl.constexpr,
    V: tl.constexpr,
    PADDED: tl.constexpr,
    N: tl.constexpr,
):
    """One head of one row: N splits at a time, in split order."""
    row, head = tl.program_id(0), tl.program_id(1)
    limit, first = tl.load(limits_ptr + row), 0
    if firsts_ptr is not None:
        first = tl.load(firsts_ptr + row)
        limit = tl.where(first < limit, limit, 0)
    num_splits = tl.cdiv(limit, SPLIT).to(tl.int32)
    first_split = (first // SPLIT).to(tl.int32) if firsts_ptr is not None else 0
    n_N = tl.arange(0, N)
    first_state_N = ((first_split + n_N).to(tl.int64) * tl.num_programs(0) + row) * Q + head
    state_N = first_state_N
    stride = tl.num_programs(0).to(tl.int64) * (N * Q)
    largest_N = tl.full([N], float("-inf"), tl.float32)
    for split in range(first_split, num_splits, N):
        lse_N = tl.load(lse_ptr + state_N, mask=split + n_N < num_splits, other=float("-inf"))
        largest_N = tl.maximum(largest_N, lse_N)
        state_N += stride
    largest = tl.max(largest_N, 0)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    c_C = tl.arange(0, PADDED)
    real_C = c_C < V
    total_N = tl.zeros([N], tl.float32)
    sum_C = tl.zeros([PADDED], tl.float32)
    state_N = first_state_N
    for split in range(first_split, num_splits, N):
        real_N = split + n_N < num_splits
        weight_N = tl.exp(tl.load(lse_ptr + state_N, mask=real_N, other=float("-inf")) - base)
        mask_NC = real_N[:, None] & real_C[None, :]
        out_NC = tl.load(out_ptr + state_N[:, None] * V + c_C[None, :], mask=mask_NC, other=0.0)
        sum_C += tl.sum(weight_N[:, None] * out_NC, 0)
        total_N += weight_N
        state_N += stride
    total = tl.sum(total_N, 0)
    state = row.to(tl.int64) * Q + head
    tl.store(merged_lse_ptr + state, base + tl.log(total))
    # Rounded to nearest, so that one split alone is passed on bit by bit, as where there is nothing to merge.
    out_C = tl.div_rn(sum_C, tl.where(total == 0, 1.0, total))
    tl.store(merged_out_ptr + state * V + c_C, out_C.to(merged_out_ptr.dtype.element_ty), mask=real_C)
