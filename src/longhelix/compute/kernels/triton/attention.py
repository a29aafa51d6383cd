"""Attention of packed rows over a paged pool, with LSE. Source: FlashAttention (arXiv 2205.14135), split by keys.

One kernel in two shapes, for sequences with few rows (decode) and with many (a chunk). Both are split over their
tokens, so that one sequence alone fills the device, at fixed positions. Chunks are split whether or not their rows
alone would fill it: a split is much arithmetic for a tile of many rows (0.3 to 0.6 GFLOP), and little to write and to
merge (66 to 131 KB). Where so few rows' states fit that a chunk would take many turns, nothing is split: it has many
heads then, or a very long context, and its rows fill the device.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longhelix.compute.kernels.triton import latent_attention, nvfp4
from longhelix.compute.kernels.triton.merge import merge_splits
from longhelix.scheduler.kv import splits
from longhelix.scheduler.kv.splits import FEW_ROWS, SPLIT_TOKENS

_UNLIMITED = 2**30
_MOST_TURNS = 16

_DOT_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Tile(NamedTuple):
    """What a program holds: row-heads (one query head of one row), tokens per turn; its warps and stages of loads."""

    row_heads: int
    tokens: int
    warps: int
    stages: int


# By the padded channels of a value. Shared memory (227 KB) takes the queries and all stages of K and V; registers take
# a float32 sum for every row-head and channel. Block ids come a stage before K and V: 3 stages load those of the next
# turn, 5 those of the next two.
_FEW = {64: Tile(64, 128, 4, 4), 128: Tile(64, 64, 4, 5), 256: Tile(64, 32, 4, 5), 512: Tile(64, 64, 8, 3)}
_MANY = {64: Tile(128, 64, 8, 5), 128: Tile(128, 64, 4, 4), 256: Tile(64, 64, 8, 3), 512: Tile(64, 64, 8, 3)}
# Of keys and values in bytes, which are made wider between loads and products: by few warps, which wait for each other.
_FEW_BYTES = {64: Tile(16, 128, 2, 5), 128: Tile(16, 32, 1, 5), 256: Tile(16, 32, 2, 5), 512: Tile(16, 32, 4, 5)}
_TWO_ARRAYS_OF_512 = Tile(64, 32, 8, 3)
# Full float32 products do not run on tensor cores, and keep their operands in registers.
_FLOAT32 = {64: Tile(16, 32, 4, 3), 128: Tile(16, 16, 4, 3), 256: Tile(16, 16, 4, 3), 512: Tile(16, 16, 8, 3)}


def partial_attention(
    q_TqC: Tensor,
    kv_PADkC: Tensor,
    scales_PADk: Tensor | None,
    blocks_X: Tensor,
    extents_B2: Tensor,
    row_starts_B: Tensor,
    limits_T: Tensor,
    scale: float,
    value_size: int,
    max_rows: int,
    most_tokens: int,
    firsts_T: Tensor | None = None,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of packed rows over this rank's shard of their KV: `kernels.attention.partial_attention` over one pool.

    q_TqC (float32, bfloat16, float16): channels contiguous. kv_PADkC (the same, or int8 or float8_e4m3fn with
    scales_PADk in float32, or uint8 for nvfp4, with its scales in uint8): contiguous. value_size: channels of a value,
    at most 512; C if A is 2. max_rows, most_tokens: no sequence has more rows, no row sees more. They and the shapes
    decide the launches; nothing is read back from the device. No limit may exceed most_tokens or its sequence's
    blocks, which is not checked. Returns
    out_TqC (dtype of q) and lse_Tq (float32, natural); limit 0 gives 0 and -inf. Where most_tokens exceeds
    SPLIT_TOKENS, the states of splits take memory meanwhile: `splits.state_bytes` for each row, and as many rows at a
    time as `splits.STATES_BYTES` holds.
    """
    num_rows, num_query_heads, key_size = q_TqC.shape
    _, num_arrays, block_tokens, num_kv_heads, _ = kv_PADkC.shape
    num_sequences = len(extents_B2)
    is_nvfp4 = kv_PADkC.dtype == torch.uint8
    assert q_TqC.stride(2) == 1
    assert kv_PADkC.is_contiguous()
    assert blocks_X.is_contiguous()
    assert extents_B2.is_contiguous()
    assert num_arrays == 1 or value_size == key_size
    assert (scales_PADk is None) == (kv_PADkC.dtype in _DOT_DTYPES)
    out_TqC = q_TqC.new_empty(num_rows, num_query_heads, value_size)
    lse_Tq = q_TqC.new_empty(num_rows, num_query_heads, dtype=torch.float32)
    if num_rows == 0:
        return out_TqC, lse_Tq
    group = num_query_heads // num_kv_heads
    dot_dtype = q_TqC.dtype if scales_PADk is not None else torch.promote_types(q_TqC.dtype, kv_PADkC.dtype)
    few, many = _tiles(dot_dtype, kv_PADkC.dtype, num_arrays, group, value_size)
    shapes = [(few._replace(row_heads=min(few.row_heads, _padded(group))), range(1, FEW_ROWS + 1))]
    if max_rows > FEW_ROWS:
        shapes.append((many, range(FEW_ROWS + 1, _UNLIMITED)))
    one_row_each = max_rows == 1 and num_rows == num_sequences
    num_splits = triton.cdiv(most_tokens, SPLIT_TOKENS)
    scale_blocks = scales_PADk.shape[4] - 1 if is_nvfp4 else 0
    takes_latents = firsts_T is None and cap is None and latent_attention.takes(q_TqC, kv_PADkC, value_size)
    latents = latent_attention.descriptor(kv_PADkC) if takes_latents else None

    def attend(out: Tensor, lse: Tensor, rows: range) -> None:
        """Of `rows`, into results for each split."""
        sequences = rows if one_row_each else range(num_sequences)
        numbers = q_TqC.stride(0), q_TqC.stride(1), rows.start, len(rows), sequences.start, scale * math.log2(math.e)
        given = limits_T, out, lse, *numbers
        for tile, counts in shapes:
            tiles = triton.cdiv(min(max_rows, counts[-1], len(rows)) * group, tile.row_heads)
            grid = tiles * num_kv_heads, max(num_splits, 1), len(sequences)
            common = {
                "LEAST_ROWS": counts[0],
                "MOST_ROWS": counts[-1],
                "SPLIT": SPLIT_TOKENS if num_splits > 1 else 0,
                "D": block_tokens,
                "enable_fp_fusion": False,
            }
            if latents is not None:
                assert tile.row_heads == latent_attention.HEADS
                table = blocks_X, extents_B2, row_starts_B
                latent_attention.attend[grid](q_TqC, latents, *table, *given, Q=num_query_heads, num_warps=4, **common)
                continue
            _attend[grid](
                q_TqC,
                kv_PADkC,
                scales_PADk,
                blocks_X,
                extents_B2,
                row_starts_B,
                firsts_T,
                *given,
                0.0 if cap is None else cap * math.log2(math.e),
                CAPPED=cap is not None,
                A=num_arrays,
                K=num_kv_heads,
                G=group,
                C=key_size,
                V=value_size,
                HEAD=_padded(value_size),
                TAIL=_padded(key_size - value_size) if key_size > value_size else 0,
                M=tile.row_heads,
                N=tile.tokens,
                DOT=_DOT_DTYPES[dot_dtype],
                BLOCKS=scale_blocks,
                num_warps=tile.warps,
                num_stages=tile.stages,
                **common,
            )

    def attend_splits(rows: range) -> None:
        """Of `rows`; the states of their splits are gone when it returns."""
        out_NTqC = q_TqC.new_empty(num_splits, len(rows), num_query_heads, value_size, dtype=torch.float32)
        lse_NTq = q_TqC.new_empty(out_NTqC.shape[:3], dtype=torch.float32)
        attend(out_NTqC, lse_NTq, rows)
        own = slice(rows.start, rows.stop)
        firsts = None if firsts_T is None else firsts_T[own]
        merge_splits(out_NTqC, lse_NTq, firsts, limits_T[own], SPLIT_TOKENS, out_TqC[own], lse_Tq[own])

    at_once = splits.rows_at_once(num_splits, num_query_heads, value_size, shapes[-1][0].row_heads // group)
    if max_rows > FEW_ROWS and num_rows > _MOST_TURNS * at_once:
        num_splits = 1
    if num_splits <= 1:
        attend(out_TqC, lse_Tq, range(num_rows))
        return out_TqC, lse_Tq
    for first in range(0, num_rows, at_once):
        attend_splits(range(first, min(first + at_once, num_rows)))
    return out_TqC, lse_Tq


def _tiles(
    dot_dtype: torch.dtype, pool_dtype: torch.dtype, num_arrays: int, group: int, value_size: int
) -> tuple[Tile, Tile]:
    """For sequences with few rows, and with many."""
    size = max(64, _padded(value_size))
    if dot_dtype == torch.float32:
        return _FLOAT32[size], _FLOAT32[size]
    few = _FEW_BYTES if pool_dtype not in _DOT_DTYPES and group <= 16 else _FEW
    if size == 512 and num_arrays == 2 and pool_dtype in _DOT_DTYPES:
        return _TWO_ARRAYS_OF_512, _TWO_ARRAYS_OF_512
    return few[size], _MANY[size]


def _padded(size: int) -> int:
    """A power of two, and no side of a matrix product is under 16."""
    return max(16, triton.next_power_of_2(size))


@triton.jit(do_not_specialize=["first_row", "num_rows", "first_sequence"])
def _attend(
    q_ptr,
    kv_ptr,
    scales_ptr,
    blocks_ptr,
    extents_ptr,
    row_starts_ptr,
    firsts_ptr,
    limits_ptr,
    out_ptr,
    lse_ptr,
    stride_T,
    stride_q,
    first_row,
    num_rows,
    first_sequence,
    scale_log2,
    cap_log2,
    CAPPED: tl.constexpr,
    LEAST_ROWS: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    A: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    DOT: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """M row-heads of one sequence and KV head over one split of SPLIT tokens; or, if 0, over all.

    Of `num_rows` rows from `first_row` on, whose results `out` holds, once for each split. A key is V channels, padded
    to HEAD, and a tail of C - V, padded to TAIL; a value is V channels. BLOCKS: scale blocks of a vector of nvfp4, and
    0 for other numbers.
    """
    tl.static_assert(SPLIT % N == 0)
    split, sequence = tl.program_id(1), first_sequence + tl.program_id(2)
    first = tl.load(row_starts_ptr + sequence)
    last = tl.load(row_starts_ptr + sequence + 1)
    if (last - first < LEAST_ROWS) | (last - first > MOST_ROWS):
        return
    first, last = tl.maximum(first, first_row), tl.minimum(last, first_row + num_rows)
    if last <= first:
        return
    # Heads of one tile are neighbours, and so are tiles: they read the same lines of the pool at about the same time.
    kv_head = tl.program_id(0) % K
    x_X = tl.program_id(0) // K * M + tl.arange(0, M)
    row_X, head_X = first + x_X // G, kv_head * G + x_X % G
    real_X = row_X < last
    limit_X = tl.load(limits_ptr + row_X, mask=real_X, other=0).to(tl.int32)
    first_X = tl.zeros([M], tl.int32)
    if firsts_ptr is not None:
        first_X = tl.load(firsts_ptr + row_X, mask=real_X, other=0).to(tl.int32)
        limit_X = tl.where(first_X < limit_X, limit_X, 0)
    end = tl.max(limit_X, 0)
    # The first token that one of the rows sees: those before it may be in blocks that others have by now.
    low = tl.min(tl.where(limit_X > 0, first_X, end), 0)
    begin = 0
    if SPLIT:
        begin = split * SPLIT
        end = tl.minimum(begin + SPLIT, end)
        if end <= tl.maximum(begin, low):
            return
    if firsts_ptr is not None:
        begin = tl.maximum(begin, low // N * N)

    blocks_ptr += tl.load(extents_ptr + 2 * sequence)
    q_offset_X = row_X * stride_T + head_X * stride_q
    q_XC = _rows(q_ptr, q_offset_X, real_X, V, HEAD).to(DOT)
    q_tail_XC = q_XC
    if TAIL:
        q_tail_XC = _rows(q_ptr + V, q_offset_X, real_X, C - V, TAIL).to(DOT)
    largest_X = tl.full([M], float("-inf"), tl.float32)
    total_X = tl.zeros([M], tl.float32)
    sum_XC = tl.zeros([M, HEAD], tl.float32)
    # Turns of which every row sees every token compare nothing.
    least = tl.min(tl.where(real_X, tl.minimum(limit_X, end), end), 0)
    whole_begin = begin
    if firsts_ptr is not None:
        most = tl.max(tl.where(real_X, tl.minimum(first_X, end), 0), 0)
        whole_begin = begin + tl.cdiv(tl.maximum(most - begin, 0), N) * N
        for start in range(begin, tl.minimum(whole_begin, end), N):
            largest_X, total_X, sum_XC = _attend_turn(
                q_XC, q_tail_XC, kv_ptr, scales_ptr, blocks_ptr, first_X, limit_X, largest_X, total_X, sum_XC, kv_head,
                scale_log2, cap_log2, start, low, end, True, CAPPED, A, D, K, C, V, HEAD, TAIL, N, DOT, BLOCKS,
            )  # fmt: skip
    whole_end = whole_begin + tl.maximum(least - whole_begin, 0) // N * N
    for start in range(whole_begin, whole_end, N):
        largest_X, total_X, sum_XC = _attend_turn(
            q_XC, q_tail_XC, kv_ptr, scales_ptr, blocks_ptr, first_X, limit_X, largest_X, total_X, sum_XC, kv_head,
            scale_log2, cap_log2, start, low, end, False, CAPPED, A, D, K, C, V, HEAD, TAIL, N, DOT, BLOCKS,
        )  # fmt: skip
    for start in range(whole_end, end, N):
        largest_X, total_X, sum_XC = _attend_turn(
            q_XC, q_tail_XC, kv_ptr, scales_ptr, blocks_ptr, first_X, limit_X, largest_X, total_X, sum_XC, kv_head,
            scale_log2, cap_log2, start, low, end, True, CAPPED, A, D, K, C, V, HEAD, TAIL, N, DOT, BLOCKS,
        )  # fmt: skip

    slot_X = row_X - first_row
    if SPLIT:
        slot_X += split.to(tl.int64) * num_rows
    slot_X = slot_X * (K * G) + head_X
    tl.store(lse_ptr + slot_X, (largest_X + tl.log2(total_X)) * 0.6931471805599453, mask=real_X)
    out_XC = tl.where((total_X == 0)[:, None], 0.0, sum_XC / total_X[:, None])
    c_C = tl.arange(0, HEAD)
    mask_XC = real_X[:, None] & (c_C < V)[None, :]
    tl.store(out_ptr + slot_X[:, None] * V + c_C[None, :], out_XC.to(out_ptr.dtype.element_ty), mask=mask_XC)


@triton.jit
def _attend_turn(
    q_XC,
    q_tail_XC,
    kv_ptr,
    scales_ptr,
    blocks_ptr,
    first_X,
    limit_X,
    largest_X,
    total_X,
    sum_XC,
    kv_head,
    scale_log2,
    cap_log2,
    start,
    low,
    end,
    PART: tl.constexpr,
    CAPPED: tl.constexpr,
    A: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    V: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    N: tl.constexpr,
    DOT: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The state after N more tokens, those from `start` on. PART: some row may not see some of them. Those before `low`
    and from `end` on are not read."""
    s_N = start + tl.arange(0, N)
    # There the pool may hold anything: it is 0 in the products.
    written_N = (s_N >= low) & (s_N < end) if PART else tl.full([N], True, tl.int1)
    block_N = tl.load(blocks_ptr + s_N // D, mask=written_N, other=0)
    key_N = (block_N * (A * D) + s_N % D) * K + kv_head
    k_NC = _vectors(kv_ptr, scales_ptr, key_N, written_N, C, 0, V, HEAD, BLOCKS).to(DOT)
    scores_XN = tl.dot(q_XC, tl.trans(k_NC), input_precision="ieee")
    if TAIL:
        k_tail_NC = _vectors(kv_ptr, scales_ptr, key_N, written_N, C, V, C - V, TAIL, BLOCKS).to(DOT)
        scores_XN = tl.dot(q_tail_XC, tl.trans(k_tail_NC), scores_XN, input_precision="ieee")
    # Not fused with the subtraction below: that would compare an exact product with a rounded maximum, and
    # scores of 1e9 would overflow exp2.
    scores_XN *= scale_log2
    if scales_ptr is not None:
        scores_XN *= _scales(scales_ptr, key_N, written_N, BLOCKS)[None, :]
    if CAPPED:
        # cap * tanh(score / cap) of powers of 2.
        small_XN = tl.exp2(-tl.abs(scores_XN) * (2.885390081777927 / cap_log2))
        size_XN = (1.0 - small_XN) / (1.0 + small_XN) * cap_log2
        scores_XN = tl.where(scores_XN < 0.0, -size_XN, size_XN)
    if PART:
        seen_XN = (s_N[None, :] >= first_X[:, None]) & (s_N[None, :] < limit_X[:, None])
        scores_XN = tl.where(seen_XN, scores_XN, float("-inf"))
    new_largest_X = tl.maximum(largest_X, tl.max(scores_XN, 1))
    # A row that has seen nothing has no finite score; any finite base then gives exp2(-inf) = 0 in place of NaN.
    base_X = tl.where(new_largest_X == float("-inf"), 0.0, new_largest_X)
    weights_XN = tl.exp2(scores_XN - base_X[:, None])
    shrink_X = tl.exp2(largest_X - base_X)
    total_X = total_X * shrink_X + tl.sum(weights_XN, 1)
    value_N = key_N
    v_NC = k_NC
    if A == 2:
        value_N = key_N + D * K
        v_NC = _vectors(kv_ptr, scales_ptr, value_N, written_N, C, 0, V, HEAD, BLOCKS).to(DOT)
    if scales_ptr is not None:
        weights_XN *= _scales(scales_ptr, value_N, written_N, BLOCKS)[None, :]
    sum_XC = tl.dot(weights_XN.to(DOT), v_NC, sum_XC * shrink_X[:, None], input_precision="ieee")
    return new_largest_X, total_X, sum_XC


@triton.jit
def _rows(ptr, offset_X, real_X, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Rows of SIZE channels at 64-bit offsets, and 0 beyond them and where they are not real."""
    c_C = tl.arange(0, PADDED)
    mask_XC = real_X[:, None] & (c_C < SIZE)[None, :]
    return tl.load(ptr + offset_X[:, None] + c_C[None, :], mask=mask_XC, other=0.0)


@triton.jit
def _scales(scales_ptr, vector_N, real_N, BLOCKS: tl.constexpr):
    """Scales of vectors, and 0 where they are not real."""
    if BLOCKS == 0:
        return tl.load(scales_ptr + vector_N, mask=real_N, other=0.0)
    exponents_N = tl.load(scales_ptr + vector_N * (BLOCKS + 1) + BLOCKS, mask=real_N, other=0).to(tl.int32)
    scales_N = (exponents_N << 23).to(tl.float32, bitcast=True)
    return tl.where(exponents_N == 255, float("nan"), scales_N)


@triton.jit
def _vectors(
    kv_ptr,
    scales_ptr,
    vector_N,
    real_N,
    C: tl.constexpr,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """SIZE channels of vectors from FIRST on, without the scales of whole vectors."""
    if BLOCKS == 0:
        return _rows(kv_ptr + FIRST, vector_N * C, real_N, SIZE, PADDED)
    else:  # noqa: RET505 - Triton compiles what follows a return
        c_C = FIRST + tl.arange(0, PADDED)
        mask_NC = real_N[:, None] & (c_C < FIRST + SIZE)[None, :]
        byte_C = c_C // 16 * 8 + c_C % 8
        bytes_NC = tl.load(kv_ptr + vector_N[:, None] * (C // 2) + byte_C[None, :], mask=mask_NC, other=0)
        codes_NC = bytes_NC.to(tl.int32) >> (c_C % 16 // 8 * 4)[None, :]
        block_ptrs = scales_ptr + vector_N[:, None] * (BLOCKS + 1) + (c_C // 16)[None, :]
        scales_NC = nvfp4.e4m3_numbers(tl.load(block_ptrs, mask=mask_NC, other=0).to(tl.int32))
        return nvfp4.e2m1_numbers(codes_NC) * scales_NC
