"""Rows sorted by the experts that they take: a counting sort on the device, of shapes that the host knows.

A *pair* is a row and one of its experts, number row * Y + y. Pairs whose expert is on this rank get places: one expert
after the other, each in the order of its pairs. A *tile* is up to M places of one expert, what a program of a grouped
product takes; how many tiles there are depends on the routing, how many there can be at most does not.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_PAIRS = 128  # of a program
_EXPERTS = 32  # that a program compares its pairs with at a time
_BLOCKS = 64  # programs whose counts one adds up at a time


class SortedRows(NamedTuple):
    """Where pairs are, and what is where; all int32. What lies beyond the places and tiles in use is not written.

    place_X: the place of each pair, -1 if its expert is elsewhere. pair_X: the pair at each place. tiles_X3: expert (by
    its index on this rank), first place and number of places of each tile. num_tiles: (1), those in use.
    """

    place_X: Tensor
    pair_X: Tensor
    tiles_X3: Tensor
    num_tiles: Tensor


def sort_rows(experts_TY: Tensor, index_E: Tensor, rows_e: Tensor, tile_rows: int) -> SortedRows:
    """The pairs of experts_TY (int64; a number that is none of E takes no expert), with tiles of `tile_rows`.

    index_E (int32): the index of each expert among this rank's e, -1 if it is elsewhere. rows_e (int64): the rows of
    each are added to it. No row takes an expert twice, which is not checked.
    """
    num_pairs, num_experts = experts_TY.numel(), len(rows_e)
    most_places, most_tiles = most_places_and_tiles(*experts_TY.shape, num_experts, tile_rows)
    blocks = triton.cdiv(num_pairs, _PAIRS)

    def integers(*size: int) -> Tensor:
        return experts_TY.new_empty(size, dtype=torch.int32)

    rows = SortedRows(integers(num_pairs), integers(most_places), integers(most_tiles, 3), integers(1))
    counts_Xe = integers(blocks, num_experts)
    pairs = experts_TY.contiguous(), index_E, num_pairs, len(index_E)
    sizes = {"E": num_experts, "X": _PAIRS, "N": min(_EXPERTS, triton.next_power_of_2(num_experts))}
    at_once = min(_BLOCKS, triton.next_power_of_2(blocks))
    _count[blocks,](*pairs, counts_Xe, **sizes)
    _place[blocks,](*pairs, counts_Xe, *rows, rows_e, M=tile_rows, B=at_once, **sizes)
    return rows


def most_places_and_tiles(rows: int, per_row: int, num_experts: int, tile_rows: int) -> tuple[int, int]:
    """How many places and tiles rows can need: every tile holds a place, and all but one of each expert are full."""
    places = rows * min(per_row, num_experts)
    return places, min(places, (places + num_experts * (tile_rows - 1)) // tile_rows)


@triton.jit
def _taken(experts_ptr, index_ptr, num_pairs, num_numbers, X: tl.constexpr):
    """The indices of this program's pairs' experts, -1 if they are elsewhere."""
    pair_X = tl.program_id(0) * X + tl.arange(0, X)
    number_X = tl.load(experts_ptr + pair_X, mask=pair_X < num_pairs, other=-1)
    return tl.load(index_ptr + number_X, mask=(number_X >= 0) & (number_X < num_numbers), other=-1)


@triton.jit(do_not_specialize=["num_pairs", "num_numbers"])
def _count(
    experts_ptr, index_ptr, num_pairs, num_numbers, counts_ptr, E: tl.constexpr, X: tl.constexpr, N: tl.constexpr
):
    """How many of a program's X pairs take each expert."""
    index_X = _taken(experts_ptr, index_ptr, num_pairs, num_numbers, X)
    for first in range(0, E, N):
        expert_N = first + tl.arange(0, N)
        count_N = tl.sum((index_X[:, None] == expert_N[None, :]).to(tl.int32), 0)
        tl.store(counts_ptr + tl.program_id(0) * E + expert_N, count_N, mask=expert_N < E)


@triton.jit(do_not_specialize=["num_pairs", "num_numbers"])
def _place(
    experts_ptr,
    index_ptr,
    num_pairs,
    num_numbers,
    counts_ptr,
    place_ptr,
    pair_ptr,
    tiles_ptr,
    num_tiles_ptr,
    rows_ptr,
    M: tl.constexpr,
    B: tl.constexpr,
    E: tl.constexpr,
    X: tl.constexpr,
    N: tl.constexpr,
):
    """The places of a program's X pairs, and the tiles that begin with one of them."""
    block = tl.program_id(0)
    index_X = _taken(experts_ptr, index_ptr, num_pairs, num_numbers, X)
    pair_X = block * X + tl.arange(0, X)
    place_X = tl.full([X], -1, tl.int32)
    places, tiles = 0, 0  # of the experts before
    for first in range(0, E, N):
        expert_N = first + tl.arange(0, N)
        before_N = tl.zeros([N], tl.int32)  # of each expert's pairs, those of programs before
        total_N = tl.zeros([N], tl.int32)
        for start in range(0, tl.num_programs(0), B):
            block_B = start + tl.arange(0, B)
            real_BN = (block_B < tl.num_programs(0))[:, None] & (expert_N < E)[None, :]
            count_BN = tl.load(counts_ptr + block_B[:, None] * E + expert_N[None, :], mask=real_BN, other=0)
            total_N += tl.sum(count_BN, 0)
            before_N += tl.sum(tl.where((block_B < block)[:, None], count_BN, 0), 0)
        tiles_N = (total_N + M - 1) // M
        first_place_N = places + tl.cumsum(total_N, 0) - total_N
        first_tile_N = tiles + tl.cumsum(tiles_N, 0) - tiles_N
        one_XN = (index_X[:, None] == expert_N[None, :]).to(tl.int32)
        # Of its expert's pairs, counted over all programs; only where it takes the expert.
        rank_XN = before_N[None, :] + tl.cumsum(one_XN, 0) - one_XN
        rank_X = tl.sum(one_XN * rank_XN, 1)
        found_X = tl.sum(one_XN, 1) > 0
        place_X = tl.where(found_X, tl.sum(one_XN * first_place_N[None, :], 1) + rank_X, place_X)
        tile_X = tl.sum(one_XN * first_tile_N[None, :], 1) + rank_X // M
        left_X = tl.sum(one_XN * total_N[None, :], 1) - rank_X
        begins_X = found_X & (rank_X % M == 0)
        tl.store(tiles_ptr + 3 * tile_X, index_X, mask=begins_X)
        tl.store(tiles_ptr + 3 * tile_X + 1, place_X, mask=begins_X)
        tl.store(tiles_ptr + 3 * tile_X + 2, tl.minimum(left_X, M), mask=begins_X)
        if block == 0:
            rows_N = tl.load(rows_ptr + expert_N, mask=expert_N < E, other=0)
            tl.store(rows_ptr + expert_N, rows_N + total_N, mask=expert_N < E)
        places += tl.sum(total_N, 0)
        tiles += tl.sum(tiles_N, 0)
    tl.store(place_ptr + pair_X, place_X, mask=pair_X < num_pairs)
    tl.store(pair_ptr + place_X, pair_X, mask=place_X >= 0)
    if block == 0:
        tl.store(num_tiles_ptr, tiles)
