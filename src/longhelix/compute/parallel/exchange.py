"""The exchange: one all-to-all over query heads that carries partial outputs and LSEs together, then the merge.

Helix, arXiv 2507.07120, section 2.1: each rank of a KVP group sends every other rank that rank's slice of query heads,
and merges the slices that it receives. The bytes sent depend on rows and heads, never on the KV length. A rank without
KV of a row's request sends nothing for that row, except in CUDA graphs, where exchanges are padded.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from longhelix.compute.kernels import merge_states
from longhelix.compute.parallel.collectives import RankGroup
from longhelix.compute.parallel.holders import Holding

_LSE_BYTES = 4


def gather_heads(out_TnC: Tensor, group: RankGroup, heads_per_rank: list[int]) -> Tensor:
    """Gather the merged slices of all ranks: all heads of the group, out_TqC. Second exchange of the tied layout."""
    if group.size == 1:
        return out_TnC
    rows, _, head_size = out_TnC.shape
    sizes = [rows * heads * head_size for heads in heads_per_rank]
    received = group.all_to_all(
        out_TnC.reshape(-1).repeat(group.size), send_sizes=[out_TnC.numel()] * group.size, receive_sizes=sizes
    )
    return torch.cat([heads.view(rows, -1, head_size) for heads in received.split(sizes) if heads.numel()], dim=1)


def exchange(
    out_tqC: Tensor, lse_tq: Tensor, group: RankGroup, heads_per_rank: list[int], holders: Holding | None = None
) -> Tensor:
    """Exchange partial attention, and merge this rank's slice of query heads.

    Args:
        out_tqC: Partial outputs.
        lse_tq: Their LSEs. float32.
        heads_per_rank: Number of the q local query heads that each rank of `group` gets. May be 0.
        holders: Which ranks keep KV for which rows. None: every rank has all T rows.

    Returns:
        out_TnC, in the dtype of `out_tqC`.
    """
    if group.size == 1:
        return out_tqC
    if group.merges(out_tqC.shape[2]):
        places_NT = None if holders is None else holders.places_NT
        return group.exchange_states(out_tqC, lse_tq, heads_per_rank, places_NT)
    return start_exchange(out_tqC, lse_tq, group, heads_per_rank, holders)()


def start_exchange(
    out_tqC: Tensor, lse_tq: Tensor, group: RankGroup, heads_per_rank: list[int], holders: Holding | None = None
) -> Callable[[], Tensor]:
    """Begin an `exchange`. Call the returned function to wait for the result. For groups that overlap."""
    rows, _, head_size = out_tqC.shape
    row_bytes, own_heads = head_size * out_tqC.element_size() + _LSE_BYTES, heads_per_rank[group.index]
    counts = (rows,) * group.size if holders is None else holders.counts
    packed_qtX = torch.cat(
        (out_tqC.contiguous().view(torch.uint8), lse_tq.unsqueeze(-1).contiguous().view(torch.uint8)), dim=-1
    ).transpose(0, 1)
    finish = group.start_all_to_all(
        packed_qtX.reshape(-1),
        send_sizes=[heads * rows * row_bytes for heads in heads_per_rank],
        receive_sizes=[own_heads * count * row_bytes for count in counts],
    )
    return lambda: _merged(finish(), out_tqC, own_heads, counts, holders)


def _merged(
    received: Tensor, out_tqC: Tensor, own_heads: int, counts: tuple[int, ...], holders: Holding | None
) -> Tensor:
    """Merge the states received from all ranks, in the order of the ranks. Returns out_TnC."""
    head_size = out_tqC.shape[2]
    out_bytes = head_size * out_tqC.element_size()
    received_UX = received.view(-1, out_bytes + _LSE_BYTES)
    out_UC = received_UX[:, :out_bytes].contiguous().view(out_tqC.dtype)
    lse_U = received_UX[:, out_bytes:].contiguous().view(torch.float32).squeeze(-1)
    if holders is None:
        out_NnTC = out_UC.view(len(counts), own_heads, counts[0], head_size)
        lse_NnT = lse_U.view(len(counts), own_heads, counts[0])
    else:
        at_NnT = _where(holders, own_heads)
        # States of rows for which a rank has no KV get no weight.
        held_N1T = (holders.places_NT >= 0).unsqueeze(1)
        out_NnTC, lse_NnT = out_UC[at_NnT], lse_U[at_NnT].masked_fill(~held_N1T, -torch.inf)
    merged_nTC, _ = merge_states(out_NnTC, lse_NnT)
    return merged_nTC.transpose(0, 1)


def _where(holders: Holding, own_heads: int) -> Tensor:
    """Return at_NnT: index of the state of a row and head among the received ones. 0 if a rank has not sent it.

    The states of each rank are ordered by head, then by row.
    """
    start_N11, count_N11 = holders.spans_N2.view(-1, 2, 1, 1).unbind(1)
    heads_n1 = torch.arange(own_heads, device=start_N11.device).unsqueeze(1)
    place_N1T = holders.places_NT.clamp(min=0).unsqueeze(1)
    at_NnT = start_N11 * own_heads + heads_n1 * count_N11 + place_N1T
    return torch.where(holders.places_NT.unsqueeze(1) >= 0, at_NnT, 0)
