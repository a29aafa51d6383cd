"""Attention over latents (MLA, absorbed) on Hopper GPUs, in Gluon: one program for 64 heads of one row.

Two warp groups share a row's heads: each computes the scores of every other tile of 64 tokens, and keeps half of the
value channels of the sum, to which it adds both tiles. So no score is computed twice, and neither holds more than its
registers take. A third group of one warp loads tiles by TMA, one ahead for each of the two.
Source: the schedule of FlashMLA (github.com/deepseek-ai/FlashMLA, docs/20250422-new-kernel-deep-dive.md).
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

HEADS = 64
KEY_SIZE = 576
VALUE_SIZE = 512
PAGE_TOKENS = 16  # that one TMA copy loads, of 64 channels
_DTYPES = (torch.bfloat16, torch.float16)
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
# Of tiles in registers: scores, sums over half of the channels, weights as operands, and numbers by row of each.
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
_WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]), 2))
_SCORES_X = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])))
_SUMS_X = gl.constexpr(gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])))
_ROW = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))  # of copies: a warp takes 4 rows of 64 channels


def takes(q_TqC: Tensor, kv_PADkC: Tensor, value_size: int) -> bool:
    """Whether `attend` is for these: bfloat16 or float16 latents of DeepSeek's sizes, heads in 64s, on a Hopper GPU."""
    _, num_arrays, block_tokens, num_kv_heads, key_size = kv_PADkC.shape
    return (
        q_TqC.is_cuda
        and torch.cuda.get_device_capability(q_TqC.device)[0] == 9
        and q_TqC.dtype == kv_PADkC.dtype
        and q_TqC.dtype in _DTYPES
        and (num_arrays, num_kv_heads, key_size, value_size) == (1, 1, KEY_SIZE, VALUE_SIZE)
        and q_TqC.shape[1] % HEADS == 0
        and block_tokens % PAGE_TOKENS == 0
    )


def descriptor(kv_PADkC: Tensor) -> TensorDescriptor:
    """What the kernel loads the pool by: its tokens, one after the other."""
    return TensorDescriptor.from_tensor(kv_PADkC.view(-1, KEY_SIZE), [PAGE_TOKENS, 64], LAYOUT)


@gluon.jit(do_not_specialize=["first_row", "num_rows", "first_sequence"])
def attend(
    q_ptr,
    latents,
    blocks_ptr,
    extents_ptr,
    row_starts_ptr,
    limits_ptr,
    out_ptr,
    lse_ptr,
    stride_T,
    stride_q,
    first_row,
    num_rows,
    first_sequence,
    scale_log2,
    LEAST_ROWS: gl.constexpr,
    MOST_ROWS: gl.constexpr,
    SPLIT: gl.constexpr,
    D: gl.constexpr,
    Q: gl.constexpr,
):
    """64 heads of one row over one split of SPLIT tokens; or, if 0, over all. Arguments are those of
    `attention._attend`; `latents` is the pool's `descriptor`."""
    gl.static_assert(SPLIT % 64 == 0)
    TILE: gl.constexpr = latents.layout
    DTYPE: gl.constexpr = latents.dtype
    sequence = first_sequence + gl.program_id(2)
    first = gl.load(row_starts_ptr + sequence)
    last = gl.load(row_starts_ptr + sequence + 1)
    if (last - first < LEAST_ROWS) | (last - first > MOST_ROWS):
        return
    tile = gl.program_id(0)
    row = gl.maximum(first, first_row) + tile // (Q // 64)
    if row >= gl.minimum(last, first_row + num_rows):
        return
    head = tile % (Q // 64) * 64
    begin = gl.program_id(1) * SPLIT
    end = gl.load(limits_ptr + row).to(gl.int32)
    if SPLIT:
        end = gl.minimum(begin + SPLIT, end)
        if end <= begin:
            return
    blocks_ptr += gl.load(extents_ptr + 2 * sequence)
    slot = row - first_row
    if SPLIT:
        slot += gl.program_id(1).to(gl.int64) * num_rows
    slot = slot * Q + head

    q_head = gl.allocate_shared_memory(DTYPE, [64, 512], TILE)
    q_tail = gl.allocate_shared_memory(DTYPE, [64, 64], TILE)
    x_X = gl.arange(0, 64, gl.SliceLayout(1, _ROW))
    c_C = gl.arange(0, 64, gl.SliceLayout(0, _ROW))
    q_ptrs_XC = q_ptr + row * stride_T + (head + x_X)[:, None] * stride_q + c_C[None, :]
    for part in gl.static_range(8):
        q_head.slice(64 * part, 64, 1).store(gl.load(q_ptrs_XC + 64 * part))
    q_tail.store(gl.load(q_ptrs_XC + 512))
    fence_async_shared()

    # Two tiles, each of 8 panels of 64 channels (and one of the tail), each of 4 pages of 16 tokens.
    head_pages = gl.allocate_shared_memory(DTYPE, [2 * 8 * 4, 16, 64], TILE)
    tail_pages = gl.allocate_shared_memory(DTYPE, [2 * 4, 16, 64], TILE)
    largest = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    totals = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    loaded = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    weighed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for side in gl.static_range(2):
        mbarrier.init(loaded.index(side), count=1)
        mbarrier.init(read.index(side), count=2)
        mbarrier.init(weighed.index(side), count=1)
        mbarrier.init(summed.index(side), count=1)
    fence_async_shared()

    begin, end = gl.to_tensor(begin), gl.to_tensor(end)
    shared = (q_head, q_tail, head_pages, tail_pages, largest, totals, loaded, read, weighed, summed)
    own = (begin, end, gl.to_tensor(scale_log2), out_ptr + slot * 512, lse_ptr + slot)
    gl.warp_specialize(
        [
            (_left, (shared, own)),
            (_right, (shared, own)),
            (_load, (latents, blocks_ptr, head_pages, tail_pages, loaded, read, begin, end, D)),
        ],
        [4, 1],
        [232, 24],
    )


@gluon.jit
def _load(latents, blocks_ptr, head_pages, tail_pages, loaded, read, begin, end, D: gl.constexpr):
    """Tiles of an even number. Pages beyond the last one are that one again: whoever weighs a tile removes them."""
    last_page = (end - 1) // 16 * 16
    for turn in range(gl.cdiv(end - begin, 128)):
        for side in gl.static_range(2):
            start = begin + (2 * turn + side) * 64
            token0 = gl.minimum(start, last_page)
            token1 = gl.minimum(start + 16, last_page)
            token2 = gl.minimum(start + 32, last_page)
            token3 = gl.minimum(start + 48, last_page)
            row0 = gl.load(blocks_ptr + token0 // D).to(gl.int32) * D + token0 % D
            row1 = gl.load(blocks_ptr + token1 // D).to(gl.int32) * D + token1 % D
            row2 = gl.load(blocks_ptr + token2 // D).to(gl.int32) * D + token2 % D
            row3 = gl.load(blocks_ptr + token3 // D).to(gl.int32) * D + token3 % D
            bar = loaded.index(side)
            mbarrier.wait(read.index(side), (turn & 1) ^ 1)
            mbarrier.expect(bar, 64 * 576 * 2)
            for part in gl.static_range(8):
                page = 32 * side + 4 * part
                tma.async_copy_global_to_shared(latents, [row0, 64 * part], bar, head_pages.index(page))
                tma.async_copy_global_to_shared(latents, [row1, 64 * part], bar, head_pages.index(page + 1))
                tma.async_copy_global_to_shared(latents, [row2, 64 * part], bar, head_pages.index(page + 2))
                tma.async_copy_global_to_shared(latents, [row3, 64 * part], bar, head_pages.index(page + 3))
            tma.async_copy_global_to_shared(latents, [row0, 512], bar, tail_pages.index(4 * side))
            tma.async_copy_global_to_shared(latents, [row1, 512], bar, tail_pages.index(4 * side + 1))
            tma.async_copy_global_to_shared(latents, [row2, 512], bar, tail_pages.index(4 * side + 2))
            tma.async_copy_global_to_shared(latents, [row3, 512], bar, tail_pages.index(4 * side + 3))


@gluon.jit
def _scores(q_head, q_tail, heads, tails, SIDE: gl.constexpr, begin_tile, end, scale_log2):
    """Base-2 scores of a tile; tokens from `end` on have -inf, and their values become 0 in shared memory."""
    head, tail = heads.index(SIDE), tails.index(SIDE)
    scores_XN = gl.zeros([64, 64], gl.float32, _SCORES)
    scores_XN = warpgroup_mma(q_head, head.permute([1, 0]), scores_XN, use_acc=False, is_async=True)
    scores_XN = warpgroup_mma(q_tail, tail.permute([1, 0]), scores_XN, is_async=True)
    scores_XN = warpgroup_mma_wait(0, [scores_XN])
    scores_XN *= scale_log2
    if begin_tile + 64 > end:
        s_N = begin_tile + gl.arange(0, 64, gl.SliceLayout(0, _SCORES))
        scores_XN = gl.where((s_N < end)[None, :], scores_XN, float("-inf"))
        real_N = begin_tile + gl.arange(0, 64, gl.SliceLayout(1, _ROW)) < end
        for part in gl.static_range(8):
            panel = head.slice(64 * part, 64, 1)
            values_NC = panel.load(_ROW)
            panel.store(gl.where(real_N[:, None], values_NC, gl.zeros_like(values_NC)))
    return scores_XN


@gluon.jit
def _weigh(scores_XN, largest_X):
    """Weights by the new largest score, which comes first; what they are relative to is finite."""
    new_largest_X = gl.maximum(largest_X, gl.max(scores_XN, 1))
    base_X = gl.where(new_largest_X == float("-inf"), 0.0, new_largest_X)
    return new_largest_X, base_X, gl.exp2(scores_XN - base_X[:, None])


@gluon.jit
def _left(shared, own):
    """Weighs the even tiles, and keeps the first 256 channels."""
    q_head, q_tail, head_pages, tail_pages, largest, totals, loaded, read, weighed, summed = shared
    begin, end, scale_log2, out_ptr, lse_ptr = own
    DTYPE: gl.constexpr = head_pages.dtype
    TILE: gl.constexpr = q_head.layout
    heads = head_pages._reinterpret(DTYPE, [2, 64, 512], TILE)
    tails = tail_pages._reinterpret(DTYPE, [2, 64, 64], TILE)
    largest_X = gl.full([64], float("-inf"), gl.float32, _SCORES_X)
    total_X = gl.zeros([64], gl.float32, _SCORES_X)
    sum_XC = gl.zeros([64, 256], gl.float32, _SUMS)
    for turn in range(gl.cdiv(end - begin, 128)):
        phase = turn & 1
        mbarrier.wait(loaded.index(0), phase)
        scores_XN = _scores(q_head, q_tail, heads, tails, 0, begin + 128 * turn, end, scale_log2)
        largest0_X, base0_X, weights_XN = _weigh(scores_XN, largest_X)
        shrink_X = gl.exp2(largest_X - base0_X)
        total_X = total_X * shrink_X + gl.sum(weights_XN, 1)
        narrow_XN = weights_XN.to(DTYPE)
        # The tail of the keys has been read: its place takes the weights for the other side.
        tails.index(0).store(narrow_XN)
        largest.index(0).store(largest0_X)
        fence_async_shared()
        mbarrier.arrive(weighed.index(0), count=1)
        sum_XC *= gl.convert_layout(shrink_X, _SUMS_X)[:, None]
        operand_XN = gl.convert_layout(narrow_XN, _WEIGHTS)
        sum_XC = warpgroup_mma(operand_XN, heads.index(0).slice(0, 256, 1), sum_XC, is_async=True)
        sum_XC, operand_XN = warpgroup_mma_wait(0, [sum_XC, operand_XN])
        mbarrier.arrive(read.index(0), count=1)
        mbarrier.wait(weighed.index(1), phase)
        largest_X = largest.index(1).load(_SCORES_X)
        base_X = gl.where(largest_X == float("-inf"), 0.0, largest_X)
        shrink_X = gl.exp2(largest0_X - base_X)
        total_X *= shrink_X
        sum_XC *= gl.convert_layout(shrink_X, _SUMS_X)[:, None]
        sum_XC = warpgroup_mma(tails.index(1), heads.index(1).slice(0, 256, 1), sum_XC, is_async=True)
        sum_XC = warpgroup_mma_wait(0, [sum_XC])
        mbarrier.arrive(read.index(1), count=1)
    totals.index(0).store(total_X)
    mbarrier.arrive(summed.index(0), count=1)
    mbarrier.wait(summed.index(1), 0)
    total_X += totals.index(1).load(_SCORES_X)
    x_X = gl.arange(0, 64, _SCORES_X)
    gl.store(lse_ptr + x_X, (largest_X + gl.log2(total_X)) * 0.6931471805599453)
    _store(sum_XC, total_X, out_ptr)


@gluon.jit
def _right(shared, own):
    """Weighs the odd tiles, and keeps the last 256 channels."""
    q_head, q_tail, head_pages, tail_pages, largest, totals, loaded, read, weighed, summed = shared
    begin, end, scale_log2, out_ptr, _ = own
    DTYPE: gl.constexpr = head_pages.dtype
    TILE: gl.constexpr = q_head.layout
    heads = head_pages._reinterpret(DTYPE, [2, 64, 512], TILE)
    tails = tail_pages._reinterpret(DTYPE, [2, 64, 64], TILE)
    largest_X = gl.full([64], float("-inf"), gl.float32, _SCORES_X)
    total_X = gl.zeros([64], gl.float32, _SCORES_X)
    sum_XC = gl.zeros([64, 256], gl.float32, _SUMS)
    for turn in range(gl.cdiv(end - begin, 128)):
        phase = turn & 1
        mbarrier.wait(loaded.index(1), phase)
        scores_XN = _scores(q_head, q_tail, heads, tails, 1, begin + 128 * turn + 64, end, scale_log2)
        mbarrier.wait(weighed.index(0), phase)
        largest0_X = largest.index(0).load(_SCORES_X)
        base0_X = gl.where(largest0_X == float("-inf"), 0.0, largest0_X)
        sum_XC *= gl.convert_layout(gl.exp2(largest_X - base0_X), _SUMS_X)[:, None]
        sum_XC = warpgroup_mma(tails.index(0), heads.index(0).slice(256, 256, 1), sum_XC, is_async=True)
        new_largest_X, base_X, weights_XN = _weigh(scores_XN, largest0_X)
        total_X = total_X * gl.exp2(largest_X - base_X) + gl.sum(weights_XN, 1)
        narrow_XN = weights_XN.to(DTYPE)
        tails.index(1).store(narrow_XN)
        largest.index(1).store(new_largest_X)
        fence_async_shared()
        mbarrier.arrive(weighed.index(1), count=1)
        sum_XC = warpgroup_mma_wait(0, [sum_XC])
        mbarrier.arrive(read.index(0), count=1)
        sum_XC *= gl.convert_layout(gl.exp2(largest0_X - base_X), _SUMS_X)[:, None]
        operand_XN = gl.convert_layout(narrow_XN, _WEIGHTS)
        sum_XC = warpgroup_mma(operand_XN, heads.index(1).slice(256, 256, 1), sum_XC, is_async=True)
        sum_XC, operand_XN = warpgroup_mma_wait(0, [sum_XC, operand_XN])
        mbarrier.arrive(read.index(1), count=1)
        largest_X = new_largest_X
    totals.index(1).store(total_X)
    mbarrier.arrive(summed.index(1), count=1)
    mbarrier.wait(summed.index(0), 0)
    _store(sum_XC, total_X + totals.index(0).load(_SCORES_X), out_ptr + 256)


@gluon.jit
def _store(sum_XC, total_X, out_ptr):
    total_X = gl.convert_layout(total_X, _SUMS_X)
    out_XC = gl.where((total_X == 0)[:, None], 0.0, sum_XC / total_X[:, None])
    x_X, c_C = gl.arange(0, 64, _SUMS_X), gl.arange(0, 256, gl.SliceLayout(0, _SUMS))
    gl.store(out_ptr + x_X[:, None] * 512 + c_C[None, :], out_XC.to(out_ptr.dtype.element_ty))
