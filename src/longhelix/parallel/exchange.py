"""The exchange: one all-to-all over query heads that carries partial outputs and LSEs together, then the merge.

Helix, arXiv 2507.07120, section 2.1: each rank of a KVP group sends to every other rank that rank's slice of query
heads, and merges the slices that it receives. Bytes sent depend on rows and heads, never on the KV length. A rank that
holds no KV of a row's request sends nothing for that row.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longhelix.kernels import merge_states
from longhelix.parallel.collectives import RankGroup

_LSE_BYTES = 4


@dataclass(frozen=True)
class Holders:
    """Which ranks of a KVP group hold KV for which of T rows, where not all ranks hold KV for all rows.

    index: that of this rank in the group. held_NT: whether a rank has KV for a row; at least one rank has. rows_t: the
    rows of this rank, ascending. places_NT: the place of a row among the rows of each rank, -1 if that rank has no KV
    for it. Both are int64.
    """

    index: int
    held_NT: NDArray[np.bool_]
    rows_t: Tensor
    places_NT: Tensor

    @classmethod
    def of(cls, held_NT: NDArray[np.bool_], index: int, device: torch.device) -> "Holders":
        places_NT = np.where(held_NT, held_NT.cumsum(axis=1) - 1, -1)
        rows_t = torch.from_numpy(held_NT[index].nonzero()[0])
        return cls(index, held_NT, rows_t.to(device), torch.from_numpy(places_NT).to(device))

    @property
    def counts(self) -> tuple[int, ...]:
        """How many rows each rank has."""
        return tuple(self.held_NT.sum(axis=1).tolist())

    def own(self, part: range) -> slice:
        """Which of the rows of this rank lie in `part`, a range of all T rows."""
        start = int(self.held_NT[self.index, : part.start].sum())
        return slice(start, start + int(self.held_NT[self.index, part.start : part.stop].sum()))

    def cut(self, part: range) -> "Holders":
        """The holders of `part`, a range of the T rows."""
        return self.of(self.held_NT[:, part.start : part.stop], self.index, self.rows_t.device)


def gather_heads(out_TnC: Tensor, group: RankGroup, heads_per_rank: list[int]) -> Tensor:
    """All heads of the group, out_TqC, from the slices that its ranks have merged: the second exchange of the tied
    layout."""
    if group.size == 1:
        return out_TnC
    rows, _, head_size = out_TnC.shape
    sizes = [rows * heads * head_size for heads in heads_per_rank]
    received = group.all_to_all(
        out_TnC.reshape(-1).repeat(group.size), send_sizes=[out_TnC.numel()] * group.size, receive_sizes=sizes
    )
    return torch.cat([heads.view(rows, -1, head_size) for heads in received.split(sizes) if heads.numel()], dim=1)


def exchange(
    out_tqC: Tensor, lse_tq: Tensor, group: RankGroup, heads_per_rank: list[int], holders: Holders | None = None
) -> Tensor:
    """Merged attention of this rank's slice of query heads: out_TnC, in the dtype of `out_tqC`.

    `heads_per_rank`: how the q local query heads fall to the ranks of `group`; a rank may get none. `holders`: None
    where the t rows of every rank are all T.
    """
    if group.size == 1:
        return out_tqC
    if group.merges(out_tqC.shape[2]):
        places_NT = None if holders is None else holders.places_NT
        return group.exchange_states(out_tqC, lse_tq, heads_per_rank, places_NT)
    return start_exchange(out_tqC, lse_tq, group, heads_per_rank, holders)()


def start_exchange(
    out_tqC: Tensor, lse_tq: Tensor, group: RankGroup, heads_per_rank: list[int], holders: Holders | None = None
) -> Callable[[], Tensor]:
    """Begin the exchange. Call what it returns to wait for the result. For groups that overlap."""
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
    received: Tensor, out_tqC: Tensor, own_heads: int, counts: tuple[int, ...], holders: Holders | None
) -> Tensor:
    """Merge the states that came from all ranks, in the order of the ranks: out_TnC."""
    head_size = out_tqC.shape[2]
    out_bytes = head_size * out_tqC.element_size()
    received_UX = received.view(-1, out_bytes + _LSE_BYTES)
    out_UC = received_UX[:, :out_bytes].contiguous().view(out_tqC.dtype)
    lse_U = received_UX[:, out_bytes:].contiguous().view(torch.float32).squeeze(-1)
    if holders is None:
        out_NnTC = out_UC.view(len(counts), own_heads, counts[0], head_size)
        lse_NnT = lse_U.view(len(counts), own_heads, counts[0])
    else:
        rows = holders.places_NT.shape[1]
        out_NnTC = out_UC.new_zeros(len(counts), own_heads, rows, head_size)
        lse_NnT = lse_U.new_full((len(counts), own_heads, rows), -torch.inf)
        sizes = [own_heads * count for count in counts]
        for rank, (out, lse) in enumerate(zip(out_UC.split(sizes), lse_U.split(sizes), strict=True)):
            held_T = holders.places_NT[rank] >= 0
            out_NnTC[rank, :, held_T] = out.view(own_heads, counts[rank], head_size)
            lse_NnT[rank, :, held_T] = lse.view(own_heads, counts[rank])
    merged_nTC, _ = merge_states(out_NnTC, lse_NnT)
    return merged_nTC.transpose(0, 1)
