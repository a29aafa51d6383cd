"""The exchange: one all-to-all over query heads that carries partial outputs and LSEs together, then the merge.

Helix, arXiv 2507.07120, section 2.1: each rank of a KVP group sends every other one that one's slice of query heads
and merges the slices that it receives. Bytes sent depend on rows and heads, never on the KV length.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from longhelix.kernels import merge_states
from longhelix.parallel.collectives import Group

_LSE_BYTES = 4


def gather_heads(out_TnC: Tensor, group: Group, heads_per_rank: list[int]) -> Tensor:
    """All heads of the group, out_TqC, from the slices that its ranks hold whole: the tied layout's second exchange."""
    if group.size == 1:
        return out_TnC
    rows, _, head_size = out_TnC.shape
    sizes = [rows * heads * head_size for heads in heads_per_rank]
    received = group.all_to_all(
        out_TnC.reshape(-1).repeat(group.size), send_sizes=[out_TnC.numel()] * group.size, receive_sizes=sizes
    )
    return torch.cat([part.view(rows, -1, head_size) for part in received.split(sizes) if part.numel()], dim=1)


def exchange(out_TqC: Tensor, lse_Tq: Tensor, group: Group, heads_per_rank: list[int]) -> Tensor:
    """Merged attention of this rank's slice of query heads: out_TnC, in the dtype of `out_TqC`.

    `heads_per_rank`: how the q local query heads fall to the ranks of `group`; a rank may get none.
    """
    if group.size == 1:
        return out_TqC
    if (merged_TnC := group.exchange_states(out_TqC, lse_Tq, heads_per_rank)) is not None:
        return merged_TnC
    send, *sizes = _packed(out_TqC, lse_Tq, group, heads_per_rank)
    return _merged(group.all_to_all(send, *sizes), out_TqC, group, heads_per_rank)


def start_exchange(out_TqC: Tensor, lse_Tq: Tensor, group: Group, heads_per_rank: list[int]) -> Callable[[], Tensor]:
    """The exchange under way: call what it returns for its result. For groups that overlap."""
    finish = group.start_all_to_all(*_packed(out_TqC, lse_Tq, group, heads_per_rank))
    return lambda: _merged(finish(), out_TqC, group, heads_per_rank)


def _packed(
    out_TqC: Tensor, lse_Tq: Tensor, group: Group, heads_per_rank: list[int]
) -> tuple[Tensor, list[int], list[int]]:
    """What is sent, outputs and LSEs as bytes, and how many bytes go to and come from each rank."""
    rows, row_bytes = len(out_TqC), out_TqC.shape[2] * out_TqC.element_size() + _LSE_BYTES
    packed_qTX = torch.cat(
        (out_TqC.contiguous().view(torch.uint8), lse_Tq.unsqueeze(-1).contiguous().view(torch.uint8)), dim=-1
    ).transpose(0, 1)
    send_sizes = [heads * rows * row_bytes for heads in heads_per_rank]
    return packed_qTX.reshape(-1), send_sizes, [send_sizes[group.index]] * group.size


def _merged(received: Tensor, out_TqC: Tensor, group: Group, heads_per_rank: list[int]) -> Tensor:
    rows, _, head_size = out_TqC.shape
    out_bytes = head_size * out_TqC.element_size()
    received_NnTX = received.view(group.size, heads_per_rank[group.index], rows, out_bytes + _LSE_BYTES)
    out_NnTC = received_NnTX[..., :out_bytes].contiguous().view(out_TqC.dtype)
    lse_NnT = received_NnTX[..., out_bytes:].contiguous().view(torch.float32).squeeze(-1)
    merged_nTC, _ = merge_states(out_NnTC, lse_NnT)
    return merged_nTC.transpose(0, 1)
